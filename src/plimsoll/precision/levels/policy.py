"""Policies: data on the precision of operations and modules."""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from rich.table import Table
from torch import nn

from plimsoll import formats
from plimsoll.checks import one_of
from plimsoll.emulate.casting import CUDA, Category, OperationLists
from plimsoll.emulate.module_regions import named_modules
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
    """Line of a policy: its subject, the name or glob, and the list or format."""

    kind: str
    name: str
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Operation lists of the amp levels, and formats of single modules.

    Methods return new policies.

    Attributes:
        operations: Lists of operations that run low, high or promoted, or are banned. Default: the lists of torch's
            autocast on CUDA, on every device.
        modules: Globs over module names, each with a format. A module's full name is tried first, then the globs, the
            last one first. A rule holds for everything inside the module, unless another rule names a part of it. The
            root is called "model".
        fp8_history: For fp8-tensor: number of past steps whose largest magnitude sets a scale; 0: the tensor itself
            does.
        fp8_margin: For fp8-tensor: binades that a scale leaves free at the top.
        fp8_plans: Linear layers that a plan has in E4M3 and E5M2 are "multiplied" in FP8 or "emulated"; "auto":
            multiplied where the device has FP8 units.

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
        one_of("Policy", "fp8_plans", self.fp8_plans, get_args(PlanFP8), remedy="Leave it out.")

    @property
    def own_lists(self) -> bool:
        """True if the operation lists differ from torch's."""
        return self.operations != CUDA

    def with_operation(self, operation: object, place: Category | None) -> "Policy":
        """Return the policy with an operation on a list, or on none.

        Give a name or a torch function.
        """
        if place is None:
            return replace(self, operations=self.operations.without(operation))
        one_of(
            "Policy.with_operation",
            "place",
            place,
            get_args(Category),
            remedy="Name the list for the operation, or None.",
        )
        moved: Any = getattr(self.operations, f"with_{place}")
        return replace(self, operations=moved(operation))

    def with_module(self, glob: str, fmt: Any) -> "Policy":
        """Return the policy with the modules of that name or glob in that format."""
        return replace(self, modules=(*self.modules, (glob, _format_name(glob, fmt))))

    def with_fp8(
        self, *, history: int | None = None, margin: int | None = None, plans: PlanFP8 | None = None
    ) -> "Policy":
        """Return the policy with other FP8 scales, or another treatment of plans."""
        changes: dict[str, Any] = {"fp8_history": history, "fp8_margin": margin, "fp8_plans": plans}
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def records(self) -> list[PolicyRecord]:
        """Return the policy line by line: operations, then the modules' rules."""
        operations = [PolicyRecord("operation", name, place) for name, place in self.operations.rows()]
        modules = [PolicyRecord("module", glob, fmt) for glob, fmt in self.modules]
        return operations + modules + [PolicyRecord("fp8", name, value) for name, value in self._fp8()]

    def table(self) -> Table:
        """Return the policy as a table for the terminal."""
        table = Table(title="Precision policy", show_lines=True)
        for title in ("list", "what happens", "operations or modules"):
            table.add_column(title, overflow="fold")
        rows = self.records()
        for place, meaning in _MEANING.items():
            names = [row.name for row in rows if row.kind == "operation" and row.place == place]
            table.add_row(place, meaning, ", ".join(names) or "none")
        for glob, fmt in self.modules:
            table.add_row("module", f"runs in {fmt}", glob)
        for name, value in self._fp8():
            table.add_row("fp8", name, value)
        return table

    def _fp8(self) -> list[tuple[str, str]]:
        """Yield the FP8 settings that differ from the defaults."""
        settings = {"history": (self.fp8_history, "steps"), "margin": (self.fp8_margin, "binades")}
        lines = [(name, f"{value} {unit}") for name, (value, unit) in settings.items() if value]
        return lines if self.fp8_plans == "auto" else [*lines, ("plans", self.fp8_plans)]

    def formats_of(self, root: nn.Module) -> dict[str, str]:
        """Return the formats of modules with a rule, by name."""
        names = [name for name, _ in named_modules(root)]
        for glob, _ in self.modules:
            check_matches("prepare", "policy", glob, [name or ROOT for name in names])
        formats = {name: format_by_rules(name or ROOT, self.modules) for name in names}
        return {name: fmt for name, fmt in formats.items() if fmt is not None}


def format_by_rules(name: str, rules: Iterable[tuple[str, str]]) -> str | None:
    """Return a module's format: by its full name, or the last glob that matches."""
    backwards = list(rules)[::-1]
    own = [fmt for glob, fmt in backwards if glob == name]
    by_glob = [fmt for glob, fmt in backwards if fnmatch.fnmatchcase(name, glob)]
    return next(iter(own + by_glob), None)


def _format_name(glob: object, fmt: object) -> str:
    if not isinstance(glob, str) or not glob:
        raise ArgumentError(f'Policy: expected a module\'s name or a glob; got {glob!r}. Write "blocks.3.*".')
    return formats.get(fmt).name
