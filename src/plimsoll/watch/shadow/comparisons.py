"""Comparisons of one shadow step: rows of errors for pairs of tensors, by series."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll import kernels, row_layout
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.names import clean
from plimsoll.watch.sample import ERROR_POWERS, EntryErrors, Sample
from plimsoll.watch.session import WatchSession
from plimsoll.watch.shadow.data_parallel import DataParallel, part_of, whole
from plimsoll.watch.shadow.replay import leaf

_POWERS = torch.from_numpy(ERROR_POWERS)
# The repetition runs in modes that see every call and every look at a shape. Of 4,170 calls that they saw in a step of
# benchmarks/microscope.py, comparisons made 3,385.
_outside_modes: Any = cast("Any", torch)._C.DisableTorchFunction  # noqa: SLF001  (torch offers it nowhere else)


class Comparisons:
    """Rows of errors, by device."""

    def __init__(self) -> None:
        self._rows: dict[torch.device, list[tuple[Tensor, list[int], bool]]] = {}

    def add(
        self, series: Iterable[int], values: Tensor, reference: Tensor, *, divisor: int = 1, carries_scale: bool = False
    ) -> bool:
        """Compare values with a reference for these series; return if that is possible.

        Args:
            series: Numbers of the series.
            values: The values of the real step.
            reference: Those of the repetition.
            divisor: What the series' spectrum is measured after a division by.
            carries_scale: Whether both are multiplied by the loss scale.
        """
        with _outside_modes():
            if values.shape != reference.shape or values.device != reference.device:
                return False
            row = compared(values, reference)
            if divisor != 1:
                row *= float(divisor) ** -_POWERS.to(row.device)
            self._rows.setdefault(row.device, []).append((row, list(series), carries_scale))
            return True

    def add_row(self, series: int, row: Tensor, *, carries_scale: bool) -> None:
        """Add a row that was compared already."""
        self._rows.setdefault(row.device, []).append((row, [series], carries_scale))

    def enter(self, sample: Sample, left_out: Collection[int]) -> None:
        """Put the rows beside the sample's entries, one of each series.

        A series' entries are added up when they are written.
        """
        for device, rows_of_device in self._rows.items():
            rows = sample.rows(device)
            entries = {number: entry for entry, number in enumerate(rows.series)}
            table = DeviceValue(torch.stack([row for row, _, _ in rows_of_device]))
            for place, (_, series, carries_scale) in enumerate(rows_of_device):
                rows.errors += [
                    EntryErrors(entries[number], table, place, carries_scale)
                    for number in series
                    if number in entries and number not in left_out
                ]


def compared(values: Tensor, reference: Tensor) -> Tensor:
    """Return the row of errors of two plain tensors."""
    row = torch.zeros(row_layout.ERRORS, dtype=torch.float64, device=values.device)
    kernels.compare_into(values, reference.detach(), row)
    return row


def gradient_row(values: Tensor, reference: Tensor, errors: Tensor | None, *, absent: int) -> Tensor | None:
    """Return the row of a parameter's gradient; None where the two cannot be compared.

    Args:
        values: The gradient as the optimizer is given it; what is stored of a sparse one. Its zeros are counted.
        reference: The repetition's.
        errors: The row of the gradient as the backward left it, before unscaling and clipping. None: not known.
        absent: How many values are not stored: zero in both.
    """
    if reference.is_sparse:
        reference = reference.coalesce().values()
    if values.shape != reference.shape or values.device != reference.device:
        return None
    row = compared(values, reference)
    row[: row_layout.UNDERFLOWED] = torch.nan if errors is None else errors[: row_layout.UNDERFLOWED]
    row[[row_layout.COMPARED, row_layout.STRUCTURAL]] += absent
    return row


# -- errors of parameters' gradients, against the sums of the repetition -----------------------------------------------

_State = dict[str, tuple[int, int]]


class GradientErrors:
    """The parameters' gradients of one shadow step."""

    def __init__(self, session: WatchSession) -> None:
        self.session = session
        self._expected: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}  # what the first backward has found
        self._left: _State | None = None  # what the last backward has left
        self._rows: dict[str, Tensor] = {}
        self._are_means = False
        self._compared: dict[str, Tensor] = {}  # what they were compared with: this rank's part of the ranks' mean

    # A backward adds to what is there. So the gradients before the step's first backward are noted, and taken off what
    # the last one has left. Gradients that were replaced or changed since the backward before (a closure that sets them
    # to zero) begin again.
    def backward_begins(self, root: nn.Module) -> None:
        """A backward begins: it adds to what the last one has left, or to something else."""
        if self._left is not None and self._left == _state(root):
            return
        self._expected.clear()
        self._rows.clear()
        self._compared.clear()
        gradients = {clean(name): p.grad for name, p in root.named_parameters()}
        self._before = {name: g.detach().clone() for name, g in gradients.items() if g is not None and not g.is_sparse}
        self._left = _state(root)

    def add(self, found: Mapping[str, tuple[Tensor, Tensor | None]]) -> None:
        """Add a repetition's gradients: for each name its parameter and its gradient."""
        for name, (p, g) in found.items():
            if g is not None and not self._has_hooks(name, p):
                self._expected[name] = self._expected[name] + g if name in self._expected else g

    # Compared as the backward has left them: unscaling and clipping are no errors.
    def backward_ends(self, root: nn.Module, ranks: DataParallel | None) -> None:
        """A backward has ended, and its repetition too: compares what is there now."""
        self._are_means = ranks is not None
        for raw, p in root.named_parameters():
            name, g = clean(raw), p.grad
            expected = self._mean(name, p, ranks)
            if g is None or expected is None or g.is_sparse != expected.is_sparse:
                continue
            self._compared[name] = expected
            if g.is_sparse:
                values, expected = g.detach().coalesce().values(), expected.coalesce().values()
            else:
                values = g.detach() - self._before[name] if name in self._before else g.detach()
            plain = self.session.readable(values, "gradients", name)
            if plain is not None and plain.shape == expected.shape and plain.device == expected.device:
                self._rows[name] = compared(plain, expected)

    def note(self, root: nn.Module) -> None:
        """Note what the backward has left, to which the next one may add."""
        self._left = _state(root)

    def _mean(self, name: str, p: Tensor, ranks: DataParallel | None) -> Tensor | None:
        """Return the repetition's gradient; over ranks their mean, which all take part in."""
        expected = self._expected.get(name)
        if ranks is None or not p.requires_grad:
            return expected
        if expected is None:  # nothing on this rank, as of a part that its samples do not use
            expected = torch.zeros_like(leaf(whole(p)), requires_grad=False)
        expected = ranks.mean(expected.to_dense())
        return self.session.readable(part_of(expected, p), "gradients", name)

    def taken(self, name: str, g: Tensor) -> tuple[Tensor | None, Tensor | None, bool]:
        """Return the repetition's gradient, the errors, and if `g` is unchanged since.

        The errors are a row. Both are forgotten.
        """
        is_left = (self._left or {}).get(name) == _version_of(g) and name not in self._before
        own = self._expected.pop(name, None)
        expected = self._compared.pop(name, None if self._are_means else own)
        return expected, self._rows.pop(name, None), is_left

    def _has_hooks(self, name: str, p: Tensor) -> bool:
        """Return True if the user's hooks may have changed the real gradient."""
        if getattr(p, "_backward_hooks", None):
            self.session.say(
                "shadow", f"the gradient of {name} is not compared: it has hooks of its own", once=f"hooks {name}"
            )
            return True
        return False


def _state(root: nn.Module) -> _State:
    """Return which gradient each parameter has, and how often it has been changed."""
    gradients = {clean(name): p.grad for name, p in root.named_parameters()}
    return {name: _version_of(g) for name, g in gradients.items() if g is not None}


def _version_of(g: Tensor) -> tuple[int, int]:
    return id(g), 0 if g.is_inference() else g._version  # noqa: SLF001  (public in all but name)
