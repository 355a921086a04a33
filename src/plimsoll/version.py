"""The version, for whatever needs it without the rest of the package."""

__version__ = "0.1.0"
NEWEST_TESTED_TORCH = "2.15"  # the test suite passes with it
