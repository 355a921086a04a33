"""Plans: a format and a scale for each layer, from a recorded run."""
