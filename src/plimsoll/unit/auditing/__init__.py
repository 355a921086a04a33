"""`audit`: the scales of a model's activations and gradients."""
