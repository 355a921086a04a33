"""Planted faults; importing this registers them."""

from benchmarks.trust.faults import (
    arithmetic,
    blunders,
    breaks,
    casts,
    data,
    layers,
    loops,
    mishaps,
    mishaps_of_loops,
    narrow,
    optimizers,
    oversights,
    ranks,
    recipes,
    scales,
    slips,
)

__all__ = [
    "arithmetic",
    "blunders",
    "breaks",
    "casts",
    "data",
    "layers",
    "loops",
    "mishaps",
    "mishaps_of_loops",
    "narrow",
    "optimizers",
    "oversights",
    "ranks",
    "recipes",
    "scales",
    "slips",
]
