"""A model's forward and backward as graphs."""
