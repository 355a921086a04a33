"""Plimsoll inside other trainers: one module for each, loaded on first use.

- `plimsoll.integrations.lightning`: a callback that watches, and a precision plugin.
- `plimsoll.integrations.transformers`: a callback for Hugging Face's `Trainer`.
- `plimsoll.integrations.accelerate`: watching, and our loss scalers, with an `Accelerator`.

Each needs its package, and importing this room needs none. `plimsoll run` watches scripts of all three unchanged.
"""

from typing import TYPE_CHECKING

from plimsoll import exports

if TYPE_CHECKING:
    from plimsoll.integrations import accelerate as accelerate, lightning as lightning, transformers as transformers

# Without `__dir__`: `help` loads all that it lists, and would raise for each package that is missing.
__getattr__, _ = exports.lazy(__name__, dict.fromkeys(("accelerate", "lightning", "transformers"), ""))
