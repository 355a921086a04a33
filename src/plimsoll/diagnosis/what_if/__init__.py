"""What another format would do to a recorded run."""
