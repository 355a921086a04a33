"""What figures are drawn with."""
