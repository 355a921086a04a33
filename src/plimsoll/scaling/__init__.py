"""Loss scalers: what multiplies the loss so that small gradients survive, and what it does when large ones do not."""
