"""Casts of single values: inputs, conforming results, and the function's results."""
