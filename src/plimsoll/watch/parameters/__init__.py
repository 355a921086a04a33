"""Measurement of weights, gradients, optimizer states and updates."""
