"""Records as columns of tables."""
