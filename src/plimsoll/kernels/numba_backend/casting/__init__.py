"""Casts on the CPU."""
