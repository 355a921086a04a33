"""The effect of another format on a recorded run."""
