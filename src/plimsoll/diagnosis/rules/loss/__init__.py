"""Rules of the loss, and of its targets."""
