"""`LayerScaler`: a scale for each layer."""
