"""Block formats: single values in blocks of a known scale, the scales of blocks, and what blocks do to each other."""
