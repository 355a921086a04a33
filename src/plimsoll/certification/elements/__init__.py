"""Casts of single values: which are tried, what each should become, and what the function does with them."""
