"""Ways around known failures of low precision."""
