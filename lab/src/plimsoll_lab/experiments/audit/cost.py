"""What unit scaling costs: the multiplications that it adds to a training step, of all operations of the step (U5).

Counted on "meta", where nothing is computed, at the sizes of BERT-large: the plain model of `lab unit` and the same
architecture at unit scale, one piece forward and backward. A product of (b, m) and (m, n) has 2 b m n operations, by
torch's own counter; every value that an addition, subtraction, multiplication or division gives is one. Not counted is
what both models do alike (softmax, norms, the GELU), which would make the share smaller. A compiler may fold the added
multiplications into what stands before them: that saves time, and no operations.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from plimsoll_lab.experiments.unit.model import Plain, Unit

BERT_LARGE = {"width": 1024, "layers": 24, "heads": 16, "length": 512}
_ARITHMETIC = ("add", "sub", "mul", "div", "rsub")


class _Arithmetic(TorchDispatchMode):
    """Counts the values that additions, subtractions, multiplications and divisions give."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in _ARITHMETIC and isinstance(given, Tensor):
            self.values += given.numel()
        return given


def added_share(**sizes: int) -> float:
    """The operations that a step has more at unit scale, as a share of all that it has without."""
    plain, scaled = (operations(kind, **sizes) for kind in (Plain, Unit))
    return (sum(scaled) - sum(plain)) / sum(plain)


def operations(kind: type[Plain | Unit], **sizes: int) -> tuple[int, int]:
    """The operations of one step: those of products, and those value by value."""
    with torch.device("meta"):
        model = kind(**sizes)
        characters = torch.zeros(1, sizes["length"], dtype=torch.long)
    with FlopCounterMode(display=False) as products, _Arithmetic() as others:
        _step(model, characters)
    return int(products.get_total_flops()), others.values


def _step(model: nn.Module, characters: Tensor) -> None:
    assert isinstance(model, Plain | Unit)
    model.loss(model(characters), characters).backward()
