"""Records as columns: step tables, spectra, statistics."""
