"""Which operations and which modules run in which precision: data that a user can read and change."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from rich.table import Table
from torch import nn

from plimsoll import formats
from plimsoll.emulate.casting.operation_lists import CUDA, Category, OperationLists
from plimsoll.emulate.module_tree import named_modules
from plimsoll.emulate.plan_context import ROOT, check_matches
from plimsoll.errors import ArgumentError
from plimsoll.fp8.recipe import checked

PlanFP8 = Literal["auto", "multiplied", "emulated"]

_MEANING = {
    "low": "inputs are cast to the level's 16-bit format",
    "high": "inputs are cast to FP32",
    "promote": "inputs are cast to the widest of them",
    "banned": "refused",
}


class PolicyRecord(NamedTuple):
    """One line of a policy: what it is about, its name or glob, and where that runs."""

    kind: str
    name: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The operation lists of the amp levels, and formats of single modules. Methods return new policies.

    - `operations`: lists of operations that run low, high, promoted, or are banned; by default those of torch's
      autocast on CUDA, on every device.
    - `modules`: globs over module names, each with a format. A module's own name counts before globs, a later glob
      before an earlier one; what a rule says of a module holds for all in it, unless a rule says otherwise. The root
      is called "model".
    - `fp8_history`, `fp8_margin`: of fp8-tensor, whether a scale follows the tensor itself (0) or the largest magnitude
      of so many last steps, and how many binades it leaves above.
    - `fp8_plans`: whether linear layers that a plan has in E4M3 and E5M2 are "multiplied" in FP8, or "emulated";
      "auto": multiplied where the device has FP8 units.

    >>> policy = Policy().with_operation("softmax", "low").with_module("blocks.3.*", "fp32")
    >>> policy.operations.of("softmax"), policy.modules
    ('low', (('blocks.3.*', 'fp32'),))
    """

    operations: OperationLists = field(default=CUDA)
    modules: tuple[tuple[str, str], ...] = ()
    fp8_history: int = 0
    fp8_margin: int = 0
    fp8_plans: PlanFP8 = "auto"

    def __post_init__(self) -> None:
        modules = tuple((glob, _format_name(glob, fmt)) for glob, fmt in self.modules)
        object.__setattr__(self, "modules", modules)
        checked("Policy", "tensor", self.fp8_history, self.fp8_margin)
        if self.fp8_plans not in get_args(PlanFP8):
            raise ArgumentError(
                f"Policy: expected fp8_plans to be one of {', '.join(get_args(PlanFP8))}; got {self.fp8_plans!r}. "
                "Leave it out."
            )

    @property
    def own_lists(self) -> bool:
        """Whether the operation lists are others than torch's."""
        return self.operations != CUDA

    def with_operation(self, operation: object, place: Category | None) -> "Policy":
        """The policy with that operation (a name, or a function of torch) on that list; None takes it off all lists."""
        if place is None:
            return replace(self, operations=self.operations.without(operation))
        if place not in get_args(Category):
            raise ArgumentError(
                f"Policy.with_operation: expected one of {', '.join(get_args(Category))}, or None; got {place!r}. "
                "Name the list that the operation goes to."
            )
        moved: Any = getattr(self.operations, f"with_{place}")
        return replace(self, operations=moved(operation))

    def with_module(self, glob: str, fmt: Any) -> "Policy":
        """The policy with the modules of that name, or that the glob matches, in that format."""
        return replace(self, modules=(*self.modules, (glob, _format_name(glob, fmt))))

    def with_fp8(
        self, *, history: int | None = None, margin: int | None = None, plans: PlanFP8 | None = None
    ) -> "Policy":
        """The policy with delayed scales of FP8 tensors, another margin, or another way to carry out plans."""
        given: dict[str, Any] = {"fp8_history": history, "fp8_margin": margin, "fp8_plans": plans}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def records(self) -> list[PolicyRecord]:
        """The policy line by line: operations by list and name, then the modules' rules in order."""
        operations = [PolicyRecord("operation", name, place) for name, place in self.operations.rows()]
        modules = [PolicyRecord("module", glob, fmt) for glob, fmt in self.modules]
        return operations + modules + [PolicyRecord("fp8", name, said) for name, said in self._fp8()]

    def table(self) -> Table:
        """The policy as a table for the terminal."""
        table = Table(title="Precision policy", show_lines=True)
        for title in ("list", "what happens", "operations or modules"):
            table.add_column(title, overflow="fold")
        rows = self.records()
        for place, meaning in _MEANING.items():
            names = [row.name for row in rows if row.kind == "operation" and row.place == place]
            table.add_row(place, meaning, ", ".join(names) or "none")
        for glob, fmt in self.modules:
            table.add_row("module", f"runs in {fmt}", glob)
        for name, said in self._fp8():
            table.add_row("fp8", name, said)
        return table

    def _fp8(self) -> list[tuple[str, str]]:
        """What it says of FP8 tensors, where that is not the usual."""
        found = {"history": (self.fp8_history, "steps"), "margin": (self.fp8_margin, "binades")}
        told = [(name, f"{value} {unit}") for name, (value, unit) in found.items() if value]
        return told if self.fp8_plans == "auto" else [*told, ("plans", self.fp8_plans)]

    def formats_of(self, root: nn.Module) -> dict[str, str]:
        """The format that a rule gives to each module, by the module's name; those without a rule are not in it."""
        names = [name for name, _ in named_modules(root)]
        for glob, _ in self.modules:
            check_matches("prepare", "policy", glob, [name or ROOT for name in names])
        found = {name: format_by_rules(name or ROOT, self.modules) for name in names}
        return {name: fmt for name, fmt in found.items() if fmt is not None}


def format_by_rules(name: str, rules: Iterable[tuple[str, str]]) -> str | None:
    """The format that rules give to a module of that name: its own name first, then the last glob that matches."""
    backwards = list(rules)[::-1]
    own = [fmt for glob, fmt in backwards if glob == name]
    by_glob = [fmt for glob, fmt in backwards if fnmatch.fnmatchcase(name, glob)]
    return next(iter(own + by_glob), None)


def _format_name(glob: object, fmt: object) -> str:
    if not isinstance(glob, str) or not glob:
        raise ArgumentError(f'Policy: expected a module\'s name or a glob; got {glob!r}. Write "blocks.3.*".')
    return formats.get(fmt).name
