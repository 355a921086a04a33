"""Kinds of sound training; importing this registers them."""

from benchmarks.trust.healthy import (
    assorted,
    generative,
    images,
    losses,
    methods,
    near,
    recipes,
    reinforcement,
    sequences,
    structures,
    vectors,
)

__all__ = [
    "assorted",
    "generative",
    "images",
    "losses",
    "methods",
    "near",
    "recipes",
    "reinforcement",
    "sequences",
    "structures",
    "vectors",
]
