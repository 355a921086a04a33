"""What is recorded of a step."""
