"""Where a watch holds on to torch, to the model and to compiled code."""
