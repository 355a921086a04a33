"""Scale factors: formulas, and measured ones."""
