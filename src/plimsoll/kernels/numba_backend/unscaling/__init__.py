"""Unscaling gradients on the CPU, with a look for NaN and Inf."""
