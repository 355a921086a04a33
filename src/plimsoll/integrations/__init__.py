"""Plimsoll inside other people's trainers: one module for each, imported by name.

- `plimsoll.integrations.lightning`: a callback that watches, and a precision plugin.
- `plimsoll.integrations.transformers`: a callback for Hugging Face's `Trainer`.
- `plimsoll.integrations.accelerate`: watching, and our loss scalers, with an `Accelerator`.

Each needs its package, and importing this room needs none. `plimsoll run` watches scripts of all three unchanged.
"""
