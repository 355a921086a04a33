"""Reading a run."""
