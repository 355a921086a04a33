"""Measuring what an optimizer has changed, on a GPU."""
