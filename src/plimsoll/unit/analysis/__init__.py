"""What a model's operations do, as unit scaling sees it."""
