"""Codes: the functions that turn them into values, and where two 4-bit codes lie in a byte."""
