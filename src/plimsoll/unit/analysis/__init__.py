"""Analysis of a captured model: factors of operations, changes of parameters."""
