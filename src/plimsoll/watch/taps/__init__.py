"""Measurement of activations: hooks of modules, compiled code and casts."""
