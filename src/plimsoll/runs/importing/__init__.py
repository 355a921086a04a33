"""Runs of other trackers: scalars of W&B, TensorBoard and CSV files, as runs."""
