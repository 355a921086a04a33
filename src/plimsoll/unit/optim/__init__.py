"""Optimizers whose learning rate carries over width and depth: torch's own, with the rules of u-muP."""
