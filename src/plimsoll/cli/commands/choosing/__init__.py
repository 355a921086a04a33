"""Commands that help to choose a precision."""
