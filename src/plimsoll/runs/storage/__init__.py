"""A run's folder: files, names, locks, manifests, limits."""
