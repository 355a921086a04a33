"""Recording of one training step: operations, memory, compiled code."""
