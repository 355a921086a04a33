"""Which operations of a forward run in which dtype at a level: heard as they run, on "meta", where nothing is computed.

There the lists cast as they do on a GPU, and no emulation widens operands. Heard is what reaches torch's kernels.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.emulate.operation_counts import name_of
from plimsoll.precision import Policy, prepare
from plimsoll_lab.experiments.levels.model import SmallNet, loss_of

Dtypes = Mapping[str, frozenset[torch.dtype]]
_MOVING = frozenset(("_to_copy", "detach", "expand", "permute", "t", "transpose", "view"))  # none computes anything


class _Heard(TorchDispatchMode):
    """The dtypes of what each operation computes from: the first floating tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = [x.dtype for x in _tensors(args) if x.is_floating_point()]
        if floating and name_of(func) not in _MOVING:
            self.dtypes.setdefault(name_of(func), set()).add(floating[0])
        return func(*args, **(kwargs or {}))


def operations_at(level: str, policy: Policy | None = None, *, width: int = 8) -> Dtypes:
    """Each operation of the small network's forward and loss, and the dtypes that it runs in."""
    model = SmallNet(width).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pixels = torch.empty(4, 3, 32, 32, device="meta")
    classes = torch.zeros(4, dtype=torch.long, device="meta")
    with prepare(model, optimizer, level, policy=policy) as loop, _Heard() as heard, loop.forward():
        loss_of(model(pixels), classes)
    return {name: frozenset(dtypes) for name, dtypes in sorted(heard.dtypes.items())}


def told(dtypes: Dtypes) -> str:
    """The operations by dtype, in words."""
    by_dtype: dict[str, list[str]] = {}
    for name, found in dtypes.items():
        for dtype in found:
            by_dtype.setdefault(str(dtype).removeprefix("torch."), []).append(name)
    return "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in sorted(by_dtype.items()))


def _tensors(args: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for each in args:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(cast("list[Any]", each))
    return found
