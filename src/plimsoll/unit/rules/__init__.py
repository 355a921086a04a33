"""The scale rule of each operation."""
