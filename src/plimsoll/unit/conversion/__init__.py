"""`convert`: a model as its unit-scaled equivalent."""
