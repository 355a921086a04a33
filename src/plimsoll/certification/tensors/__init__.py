"""Casts as operations on tensors: shapes, strides, dtypes, side effects."""
