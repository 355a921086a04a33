"""Levels under a script that knows nothing of them."""
