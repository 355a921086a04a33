"""Precision levels for training scripts that are not changed: ``plimsoll run --precision``."""
