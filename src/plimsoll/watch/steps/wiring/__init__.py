"""Checks of how a training is wired, by facts that no spectrum shows."""
