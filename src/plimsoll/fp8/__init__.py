"""Matrix products in FP8: E4M3 forward, E5M2 for gradients, at constant scales or at one per tensor."""
