"""The code of converted modules, written from their graphs."""
