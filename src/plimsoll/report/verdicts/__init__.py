"""A run in a sentence, and in a few numbers."""
