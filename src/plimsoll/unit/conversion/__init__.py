"""`convert` turns a model into its unit-scaled equivalent."""
