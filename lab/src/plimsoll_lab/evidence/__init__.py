"""What experiments have shown, as it was recorded."""
