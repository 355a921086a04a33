"""Runs of other trackers: their scalars, read from files of W&B, TensorBoard and CSV into a run folder."""
