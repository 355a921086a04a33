"""The rules that findings come from."""
