"""State of scalers: saving, and the rule of growth."""
