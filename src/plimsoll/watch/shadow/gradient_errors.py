"""Errors of parameters' gradients in a shadow step, against the repetition's sums."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession
from plimsoll.watch.shadow.comparisons import compared
from plimsoll.watch.shadow.data_parallel import DataParallel, part_of, whole
from plimsoll.watch.shadow.replay import leaf

_State = dict[str, tuple[int, int]]


class GradientErrors:
    """The parameters' gradients of one shadow step."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
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
            plain = self.core.readable(values, "gradients", name)
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
        return self.core.readable(part_of(expected, p), "gradients", name)

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
            self.core.say(
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
