"""`locate`: the operation at which NaN, Inf or a wrong setting begins."""
