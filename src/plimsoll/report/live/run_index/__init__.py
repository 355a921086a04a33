"""The list of runs in a folder or a store."""
