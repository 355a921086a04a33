"""Registration of operators that carry no gradient."""

from collections.abc import Callable
from typing import Any

import torch


def without_autograd(library: torch.library.Library, name: str, implementation: Callable[..., Any]) -> None:
    """Register an operator's implementation, whose results require no gradient.

    Those of the arguments do not matter.
    """
    # Without a kernel for autograd, torch's fallback gives floating-point results a gradient function that only warns.
    # Falling through avoids that. Autograd is then still on inside the implementation, and would record what a backend
    # computes with torch's operators: `no_grad` keeps it from that.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, torch.no_grad()(implementation), "CompositeExplicitAutograd")
