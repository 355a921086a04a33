"""One step with a scaler: unscaling, skipping, agreeing among ranks."""
