"""The training loop of `prepare`."""
