"""Plimsoll shows how low in precision a PyTorch training run may go, and gets it there safely."""
