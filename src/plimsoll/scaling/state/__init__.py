"""What scalers save, and how their scale grows."""
