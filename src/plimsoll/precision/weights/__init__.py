"""Optimizers over 16-bit weights: FP32 masters, stochastic, Kahan."""
