"""Calls of the function under test, in conventions of arguments and results."""
