"""Writing a run, on a thread of its own."""
