"""Reading of a run."""
