"""Standing in for torch's operations, by its dispatcher."""
