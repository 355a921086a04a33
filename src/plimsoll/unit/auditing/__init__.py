"""`audit` measures the scales of a model's activations and gradients."""
