"""Analysis of a captured model: the factors of its operations, and the changes of its parameters."""
