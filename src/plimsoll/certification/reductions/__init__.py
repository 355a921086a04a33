"""Sums and matrix products: order of additions, accumulator's width, results."""
