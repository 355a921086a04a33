"""Losses and noise of values in a format, estimated from counts."""
