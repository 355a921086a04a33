"""Effects of a format, a scale or rounding on recorded values, by collection."""
