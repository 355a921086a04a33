"""Hooks and patches on torch itself."""
