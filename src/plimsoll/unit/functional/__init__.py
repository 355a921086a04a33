"""The operations of unit scaling: as `torch.nn.functional`'s, with a constant factor each way."""
