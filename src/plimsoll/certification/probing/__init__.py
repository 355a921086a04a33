"""Calls of the function under test, and its arguments and results in their various conventions."""
