"""Measuring what an optimizer has changed, on the CPU."""
