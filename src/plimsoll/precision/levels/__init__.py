"""The levels: what each holds, computes and casts in which format."""
