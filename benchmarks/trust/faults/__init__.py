"""Planted faults; importing this registers them."""

from benchmarks.trust.faults import breaks, data, layers, narrow, optimizers, scales

__all__ = ["breaks", "data", "layers", "narrow", "optimizers", "scales"]
