"""Precision levels for unchanged scripts: ``plimsoll run --precision``."""
