"""Kinds of sound training; importing this registers them."""

from benchmarks.trust.healthy import generative, images, losses, reinforcement, sequences, structures, vectors

__all__ = ["generative", "images", "losses", "reinforcement", "sequences", "structures", "vectors"]
