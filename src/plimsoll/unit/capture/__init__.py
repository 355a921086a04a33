"""Forward and backward pass of a model as graphs."""
