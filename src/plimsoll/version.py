"""The version, for whatever needs it without the rest of the package."""

__version__ = "0.1.0"
