"""What was declared of a step, and where the step differs from it."""
