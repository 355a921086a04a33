"""Parts, themes and arithmetic of figures."""
