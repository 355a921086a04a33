"""Code of converted modules, written from their graphs."""
