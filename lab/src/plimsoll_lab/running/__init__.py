"""Running experiments: in processes, with their folders and results."""
