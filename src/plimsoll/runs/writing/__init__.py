"""Writing of a run in a background thread."""
