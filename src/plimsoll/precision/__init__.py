"""Training in low precision: levels and policies, master weights, the training step."""
