"""Planted faults; importing this registers them."""

from benchmarks.trust.faults import arithmetic, breaks, data, layers, narrow, optimizers, ranks, recipes, scales

__all__ = ["arithmetic", "breaks", "data", "layers", "narrow", "optimizers", "ranks", "recipes", "scales"]
