"""Unscaling gradients on a GPU, with a look for NaN and Inf."""
