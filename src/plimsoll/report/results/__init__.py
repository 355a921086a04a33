"""Figures of results: they need no run, or take a result in its place."""
