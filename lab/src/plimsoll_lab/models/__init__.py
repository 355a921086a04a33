"""Models that several experiments train."""
