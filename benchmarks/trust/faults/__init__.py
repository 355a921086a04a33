"""Planted faults; importing this registers them."""

from benchmarks.trust.faults import breaks, data, layers, narrow, optimizers, ranks, scales

__all__ = ["breaks", "data", "layers", "narrow", "optimizers", "ranks", "scales"]
