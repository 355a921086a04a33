"""Low precision on hardware that lacks it."""
