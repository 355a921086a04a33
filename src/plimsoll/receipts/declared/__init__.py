"""A step's declared arithmetic, and the step's differences from it."""
