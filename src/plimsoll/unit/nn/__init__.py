"""The modules of unit scaling: as `torch.nn`'s, their parameters drawn with unit variance."""
