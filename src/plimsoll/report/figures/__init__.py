"""The figures: each module has one, or several that are read together."""
