"""The torch operators, which choose a backend and work under compilation."""
