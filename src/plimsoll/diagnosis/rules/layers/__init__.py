"""Rules of layers."""
