"""Precision levels: the formats of weights, operations and updates, and how they are applied to a model."""
