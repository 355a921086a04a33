"""Counting values per power of two on the CPU."""
