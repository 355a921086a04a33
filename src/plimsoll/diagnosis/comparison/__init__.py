"""Two runs: where they part."""
