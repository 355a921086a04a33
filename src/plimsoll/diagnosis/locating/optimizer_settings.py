"""Optimizers' rates, decays and momenta that are NaN or Inf: no operation's fault.

They are numbers and not tensors, so that no operation is to blame for what comes of them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.locating.fault import Fault, Source, number
from plimsoll.diagnosis.locating.tracing.tensor_facts import count_nonfinite, readable
from plimsoll.tracing.tensors import Names

_WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}
_USUAL = frozenset({"lr", "lr_decay", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSetting:
    """A number of a parameter group that is NaN or Inf when the optimizer steps."""

    optimizer: Any
    group: int
    name: str
    value: float
    index: int  # of the operations before the step
    source: Source | None
    finite: tuple[Tensor, ...]  # the group's parameters that were finite before the step

    def spoiled(self) -> Tensor | None:
        """The first parameter that the step has made non-finite."""
        return next((p for p in self.finite if _is_broken(p)), None)

    def fault(self, p: Tensor, names: Names, scale: float | None) -> Fault:
        """The fault, of which the parameter `p` was the first to suffer."""
        who, called = type(self.optimizer).__name__, names.of(p)
        reached = f"the parameter {called}" if called is not None else "a parameter"
        what = f"{_WORDS[self.name]} ({self.name})" if self.name in _WORDS else shown(self.name)
        return Fault(
            kind="nan" if math.isnan(self.value) else "inf",
            operation=f"{who}.step",
            phase="optimizer",
            sentence=f"the {what} of {who}'s parameter group {self.group} is {number(self.value)}; it reached "
            f"{shown(reached)}.",
            source=self.source,
            scalars={self.name: self.value},
            scale=scale,
            reached=reached,
        )


def bad_settings(optimizer: Any, index: int, source: Source | None) -> list[BadSetting]:
    """Return the settings of an optimizer that are NaN or Inf."""
    settings: list[BadSetting] = []
    for place, group in enumerate(cast("Iterable[Mapping[str, Any]]", optimizer.param_groups)):
        # Inf counts in the settings that torch's optimizers have. In others it may be meant: a largest norm of Inf
        # clips nothing.
        bad = {name: value for name, value in _numbers(group) if math.isnan(value) or name.split("[")[0] in _USUAL}
        if bad:
            finite = tuple(p for p in group["params"] if not _is_broken(p))
            settings += [
                BadSetting(
                    optimizer=optimizer, group=place, name=name, value=value, index=index, source=source, finite=finite
                )
                for name, value in bad.items()
            ]
    return settings


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The settings that are not finite, those of a tuple as ``betas[0]``."""
    for name, value in group.items():
        if name in ("params", "param_names", "initial_lr"):  # a schedule's own note steps nothing
            continue
        listed = list(cast("Iterable[object]", value)) if isinstance(value, list | tuple) else [cast("object", value)]
        for place, item in enumerate(listed):
            single = isinstance(item, Tensor) and item.numel() == 1 and not item.is_meta
            plain = float(cast("Tensor", item).detach()) if single else item
            if isinstance(plain, int | float) and not math.isfinite(plain):
                yield (f"{name}[{place}]" if isinstance(value, list | tuple) else name), float(plain)


def _is_broken(p: Tensor) -> bool:
    plain = readable(p.detach())
    return plain is not None and bool(count_nonfinite(plain))
