"""Parity: comparison of two recipes' training, within a tolerance set beforehand."""
