"""Which operations cast their arguments, and to what."""
