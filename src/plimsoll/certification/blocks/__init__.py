"""Block formats: single values at a known scale, scales, and whole blocks."""
