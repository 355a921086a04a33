"""Weights that are wider than the format they are used in."""
