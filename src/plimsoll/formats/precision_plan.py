"""Record of a precision plan: formats and scales of a model's modules.

`plan_file` reads and writes its file.
"""

import fnmatch
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats.catalogue import get
from plimsoll.formats.records import BlockFormat, Format
from plimsoll.intervals import Interval
from plimsoll.results import NotebookRepr
from plimsoll.text import percent

Role = Literal["weights", "activations", "gradients"]  # operands of a module's products
ROLES: tuple[Role, ...] = get_args(Role)

_MAPPINGS = ("formats", "notes", "backward", "scales", "predicted", "increases")
_OPTIONAL_TEXTS = ("default", "source", "costs")

Loss = tuple[float, float, float]  # a fraction of values: at least, about, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePlan:
    """Formats and scales of one module.

    Args:
        forward: Name of the format that the module computes in.
        backward: Name of the format of its gradients.
        weights: Power of two by which weights are multiplied before they are cast. Default: None, no scale.
        activations: The same for activations.
        gradients: The same for gradients.
    """

    forward: str
    backward: str
    weights: float | None = None
    activations: float | None = None
    gradients: float | None = None

    @classmethod
    def of(cls, forward: object, backward: object | None = None, **scales: float) -> "ModulePlan":
        """Return the plan of a format, by default with its format for gradients.

        That is E5M2 for E4M3, and the same format for others.

        >>> ModulePlan.of("e4m3").backward, ModulePlan.of("bf16").backward
        ('e5m2', 'bf16')
        """
        fmt = get(forward)
        if backward is None:
            backward = (isinstance(fmt, Format) and fmt.gradient_format) or fmt
        return cls(forward=fmt.name, backward=get(backward).name, **scales)

    @property
    def scales(self) -> dict[Role, float]:
        """Scales by role, without those that are None."""
        scales: dict[Role, float | None] = {role: getattr(self, role) for role in ROLES}
        return {role: scale for role, scale in scales.items() if scale is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(NotebookRepr):
    """Precision plan: formats and scales of modules, by names or globs.

    The mappings are not copied, so do not change them afterwards.

    Args:
        target: Precision that was planned for, for example "fp8".
        formats: Format that each module computes in.
        default: Format of modules that no name or glob matches. Default: None, they are left as they are.
        source: Origin of the plan, for example a run's path.
        notes: Reason for each module's formats, by the names of `formats`.
        backward: Format of a module's gradients if it is not the one that goes with its format (e5m2 with e4m3, else
            the same).
        scale: Loss scale to start with, a power of two.
        scales: For each module, powers of two for "weights", "activations" and "gradients". Those of gradients are for
            true gradients, without the loss scale.
        predicted: For each module's weights, activations and gradients, the fraction of values that the formats lose:
            at least, about, at most.
        tolerance: Fraction that was allowed to be lost, above 0 and at most 1.
        remarks: Sentences on the plan as a whole.
        predicted_loss: Predicted increase of the loss, as a share of the loss. None: unknown.
        increases: For each module, the shares that its formats add: by errors of the forward, by errors of updates.
        cost: Cost of the modules, as a share of their cost in BF16.
        costs: What the cost was computed for: "bytes" moved, or a device.
        budget: Largest increase of the loss that the plan was made for.

    Raises:
        ArgumentError: A scale, fraction or name is out of range.
        FormatError: A format does not exist.

    >>> plan = Plan(target="fp8", formats={"blocks.*.mlp": "e4m3", "blocks.0.mlp": "bf16"}, default="bf16")
    >>> plan.format_for("blocks.0.mlp").name, plan.format_for("blocks.1.mlp").name, plan.format_for("head").name
    ('bf16', 'e4m3', 'bf16')
    """

    target: str
    formats: Mapping[str, str] = field(hash=False)
    default: str | None = None
    source: str | None = None
    notes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    backward: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    scale: float | None = None
    scales: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, "Mapping[str, float]"], hash=False)
    predicted: Mapping[str, Mapping[str, Loss]] = field(default_factory=dict[str, "Mapping[str, Loss]"], hash=False)
    tolerance: float | None = None
    remarks: tuple[str, ...] = ()
    predicted_loss: Interval | None = None
    increases: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"], hash=False)
    cost: float | None = None
    costs: str | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_texts(self)
        _check_formats(self)
        _check_numbers(self)
        _check_prediction(self)

    def rule_for(self, module_name: str) -> str | None:
        """Return the entry of `formats` for a module: its name, or the first glob."""
        if module_name in self.formats:
            return module_name
        return next((glob for glob in self.formats if fnmatch.fnmatchcase(module_name, glob)), None)

    def format_for(self, module_name: str) -> Format | BlockFormat | None:
        """Return the format of a module, by name, the first glob, or the default."""
        module_plan = self.module(module_name)
        return None if module_plan is None else get(module_plan.forward)

    def module(self, module_name: str) -> ModulePlan | None:
        """Return the formats and scales of a module, or None if the plan has none."""
        rule = self.rule_for(module_name)
        if rule is None:
            return None if self.default is None else ModulePlan.of(self.default)
        return ModulePlan.of(self.formats[rule], self.backward.get(rule), **self.scales.get(rule, {}))

    @property
    def consequence(self) -> str | None:
        """The predicted increase of the loss and the cost, as a sentence. None: unknown."""
        said: list[str] = []
        if self.predicted_loss is not None:
            low, estimate, high = (percent(getattr(self.predicted_loss, end)) for end in ("low", "estimate", "high"))
            interval = "" if low == estimate == high else f"{low} to {high}"
            limit = "" if self.budget is None else f"of {percent(self.budget)} allowed"
            more = ", ".join(filter(None, (interval, limit)))
            said.append(f"the loss rises by {estimate}{f' ({more})' if more else ''}")
        if self.cost is not None:
            share = percent(self.cost)
            if self.costs in (None, "bytes"):
                moved = "as many bytes as BF16" if share == "100 %" else f"{share} of BF16's bytes"
                said.append(f"the plan moves {moved}")
            else:
                time = "as long as in BF16" if share == "100 %" else f"{share} of BF16's time"
                said.append(f"the plan's products take {time} on {self.costs}")
        return f"Predicted: {'; '.join(said)}." if said else None

    def __str__(self) -> str:
        """Return the remarks, and a line per module with its formats and the reason."""
        pairs = {name: "/".join(dict.fromkeys((f, self.backward.get(name, f)))) for name, f in self.formats.items()}
        lines = [f"{name}  {pair}  {self.notes.get(name, '')}".rstrip() for name, pair in pairs.items()]
        head = [*(self.remarks or [f"A plan for {self.target or 'no target'}."]), self.consequence]
        return "\n".join([*filter(None, head), *lines])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as TOML, with one line per module in each table.

        The file is written completely or not at all. Comments in an older file are lost.

        Raises:
            ArgumentError: The path is a folder, in no folder, or ends in something other than .toml.
        """
        from plimsoll.formats import plan_file

        plan_file.write({name: getattr(self, name) for name in _names(type(self))}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` or a person wrote.

        Raises:
            ArgumentError: The file is no plan.
        """
        from plimsoll.formats import plan_file

        return cls(**plan_file.read(path, _names(cls)))

    def to_dict(self) -> dict[str, object]:
        """Return the plan as data that JSON can hold."""
        return {
            "target": self.target,
            "source": self.source,
            "default": self.default,
            "scale": self.scale,
            "tolerance": self.tolerance,
            "predicted_loss": None if self.predicted_loss is None else _ends(self.predicted_loss),
            "cost": self.cost,
            "costs": self.costs,
            "budget": self.budget,
            "remarks": list(self.remarks),
            "modules": {
                name: {
                    "forward": fmt,
                    "backward": self.backward.get(name),
                    "scales": dict(self.scales.get(name, {})),
                    "predicted": {
                        role: dict(zip(("low", "estimate", "high"), loss, strict=True))
                        for role, loss in self.predicted.get(name, {}).items()
                    },
                    "increase": None if name not in self.increases else sum(self.increases[name]),
                    "note": self.notes.get(name),
                }
                for name, fmt in self.formats.items()
            },
        }


def _ends(interval: Interval) -> dict[str, float]:
    return {name: getattr(interval, name) for name in ("low", "estimate", "high")}


def _check_kinds(plan: Plan) -> None:
    for names, kind, word in ((_MAPPINGS, Mapping, "mapping by module"), (("remarks",), tuple, "tuple of sentences")):
        for name in names:
            if not isinstance(getattr(plan, name), kind):
                raise ArgumentError(f"Plan: expected {name} to be a {word}; got {name}={getattr(plan, name)!r}.")


def _check_texts(plan: Plan) -> None:
    optional = {name: "" if getattr(plan, name) is None else getattr(plan, name) for name in _OPTIONAL_TEXTS}
    texts: dict[Any, Any] = {"target": plan.target, **optional}
    named = [*plan.formats.items(), *plan.notes.items(), *plan.backward.items()]
    for where, value in (*texts.items(), *named, *(("remarks", remark) for remark in plan.remarks)):
        if not (_is_text(where) and _is_text(value)):
            raise ArgumentError(f"Plan: expected Unicode text throughout; got {where!r} = {value!r}.")


def _check_formats(plan: Plan) -> None:
    defaults = {} if plan.default is None else {"default": plan.default}
    for where, name in (*defaults.items(), *plan.formats.items(), *plan.backward.items()):
        try:
            get(name)
        except FormatError as error:
            raise FormatError(f"Plan: expected a format for {where!r}. {error}") from None
    for title in ("backward", "scales", "predicted", "increases"):
        strange = [name for name in getattr(plan, title) if name not in plan.formats]
        if strange:
            raise ArgumentError(
                f"Plan: expected {title} of modules that formats names; got {strange[0]!r}. Give it a format too, or "
                f"remove it from {title}."
            )


def _check_numbers(plan: Plan) -> None:
    if plan.scale is not None:
        _check_power("scale", plan.scale)
    if plan.tolerance is not None and not (_is_number(plan.tolerance) and 0 < plan.tolerance <= 1):
        raise ArgumentError(
            f"Plan: expected a tolerance above 0 and at most 1; got {plan.tolerance!r}. It is the fraction of a "
            "module's values that may be lost."
        )
    for name, scales in plan.scales.items():
        _check_roles("scales", name, scales)
        for role, scale in scales.items():
            _check_power(f"scales of {name!r}, {role}", scale)
            _check_scalable(plan, name, role)
    for name, losses in plan.predicted.items():
        _check_roles("predicted", name, losses)
        for role, loss in losses.items():
            _check_loss(name, role, loss)


def _check_prediction(plan: Plan) -> None:
    for name in ("cost", "budget"):
        if getattr(plan, name) is not None:
            _check_shares(name, (getattr(plan, name),), 1)
    if plan.predicted_loss is not None:
        if not isinstance(plan.predicted_loss, Interval):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                "Plan: expected predicted_loss to be an Interval, or three numbers in a file; got "
                f"{plan.predicted_loss!r}. Correct it, or leave it out."
            )
        _check_shares("predicted_loss", ends := tuple(_ends(plan.predicted_loss).values()), 3)
        if list(ends) != sorted(ends):
            raise ArgumentError(f"Plan: expected predicted_loss in rising order; got {ends!r}. Correct it.")
    for name, increases in plan.increases.items():
        _check_shares(f"increases of {name!r}", increases, 2)


def _check_shares(what: str, shares: Any, count: int) -> None:
    numbers = cast("tuple[Any, ...]", shares) if isinstance(shares, tuple) else ()
    if len(numbers) != count or not all(_is_number(share) and 0 <= share < math.inf for share in numbers):
        got: Any = numbers[0] if count == 1 and numbers else cast("Any", shares)
        raise ArgumentError(
            f"Plan: expected {what} to be {'a number' if count == 1 else f'{count} numbers'} of 0 or more; got "
            f"{got!r}. Correct it, or leave it out."
        )


def _check_roles(title: str, name: str, table: Any) -> None:
    if not isinstance(table, Mapping) or set(cast("Mapping[Any, Any]", table)) - set(ROLES):
        raise ArgumentError(
            f"Plan: expected {title} of {name!r} to be by {', '.join(ROLES)}; got {table!r}. Name some of these."
        )


def _check_power(what: str, scale: Any) -> None:
    exact = _is_number(scale) and math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5
    if not exact or not 2.0**-126 <= scale <= 2.0**127:
        raise ArgumentError(
            f"Plan: expected {what} to be a power of two from 2^-126 to 2^127; got {scale!r}. Write 1024.0, or "
            '"2^10" in a file.'
        )


def _check_scalable(plan: Plan, name: str, role: str) -> None:
    fmt = get(plan.backward.get(name, plan.formats[name]) if role == "gradients" else plan.formats[name])
    if isinstance(fmt, BlockFormat):
        raise ArgumentError(
            f"Plan: expected scales with element formats; got one for the {role} of {name!r}, which are in {fmt.name}, "
            "whose blocks have scales of their own. Leave it out."
        )


def _check_loss(name: str, role: str, loss: object) -> None:
    numbers = cast("tuple[Any, ...]", loss) if isinstance(loss, tuple) else ()
    if len(numbers) != 3 or not all(map(_is_number, numbers)) or not 0 <= numbers[0] <= numbers[1] <= numbers[2] <= 1:
        raise ArgumentError(
            f"Plan: expected predicted of {name!r}, {role}, as three rising fractions (at least, about, at most); got "
            f"{loss!r}. Correct it, or remove it."
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Return whether it is text that a UTF-8 file can hold."""
    # A lone surrogate cannot be encoded.
    return isinstance(value, str) and value == value.encode("utf-8", "ignore").decode("utf-8")


def _names(plan: type[Plan]) -> list[str]:
    return [spec.name for spec in fields(plan)]
