"""Workarounds for known failures of low precision."""
