"""Scale rule of each operation."""
