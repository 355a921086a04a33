"""Casts of operations' arguments, and the lists of operations that cast."""
