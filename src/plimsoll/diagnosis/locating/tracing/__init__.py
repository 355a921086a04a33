"""Following every operation of a training step."""
