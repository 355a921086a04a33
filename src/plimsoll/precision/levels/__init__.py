"""Precision levels, and their application to a model."""
