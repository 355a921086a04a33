"""A run's records as tables, and what is read off them."""
