"""Sums and matrix products: the order of their additions, the accumulator's width, and the results."""
