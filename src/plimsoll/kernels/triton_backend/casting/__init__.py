"""Casts on a GPU."""
