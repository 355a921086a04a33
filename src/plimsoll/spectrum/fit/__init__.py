"""How many values a format would lose, from counts alone."""
