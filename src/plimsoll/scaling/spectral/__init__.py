"""`SpectralScaler`: a scale from the spectrum of the gradients."""
