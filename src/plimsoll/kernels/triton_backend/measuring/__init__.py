"""Counting values per power of two on a GPU."""
