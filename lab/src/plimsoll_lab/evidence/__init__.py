"""Recorded outcomes of experiments."""
