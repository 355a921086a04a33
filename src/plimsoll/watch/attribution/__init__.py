"""Whose loss, whose step: backwards and optimizers of one model among others."""
