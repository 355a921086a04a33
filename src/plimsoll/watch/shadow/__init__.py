"""Repeating a step in FP32, to tell what the format lost."""
