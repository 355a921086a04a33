"""The live page: it follows runs while they are written."""
