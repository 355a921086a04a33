"""TensorBoard's event files."""
