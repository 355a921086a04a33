"""Draws of a step: small random changes, the model as it was, and sums of errors."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.spectrum.error_sums import BiasAndNoise, ErrorSums, split
from plimsoll.watch.shadow.replay import RandomState, buffers_of
from plimsoll.watch.thread_casts import active_casts

# -- small random changes of weights and float inputs, which alter roundings -------------------------------------------

# A value is multiplied by 1 + u, with u uniform and of a given root mean square. All passes of a draw, the reference's
# too, have the same changes. Inputs of 16 bits are left alone: changed, they would have to be rounded. So are weights
# of 8 bits, which are codes.

LEAST, MOST = 2.0**-12, 2.0**-4


class Perturbation:
    """Changes of one model, others for each draw, and taken back at the end."""

    def __init__(self, root: nn.Module, size: float) -> None:
        """`size`: root mean square of the relative changes."""
        self.size = min(max(size, LEAST), MOST)
        self._draw = 0
        self._narrow: set[int] = set()  # arguments of 16 bits, which a reference has in more
        changed = [p for p in root.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
        self._kept = [(p, p.detach().clone()) for p in changed]
        self._handle = root.register_forward_pre_hook(self._change_inputs, with_kwargs=True)

    def draw(self) -> None:
        """Change the weights, from what they were; and the inputs from now on."""
        self._draw += 1
        with torch.no_grad():
            for number, (p, kept) in enumerate(self._kept):
                p.copy_(self._changed(kept, number))

    def undo(self) -> None:
        """Put back what was there."""
        self._handle.remove()
        with torch.no_grad():
            for p, kept in self._kept:
                p.copy_(kept)

    def _changed(self, x: Tensor, number: int) -> Tensor:
        size = max(self.size, torch.finfo(x.dtype).eps)
        generator = torch.Generator().manual_seed(1_000_003 * self._draw + number)
        drawn = torch.rand(x.shape, generator=generator, device="cpu") - 0.5
        return (x * (1 + (12**0.5 * size) * drawn.to(x.device))).to(x.dtype)

    def _change_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        del module
        # A transform that maps over a batch refuses to draw. The weights differ in it all the same.
        if is_transformed():
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        changed = [self._input(x, -1 - place) for place, x in enumerate(leaves)]
        return pytree.tree_unflatten(changed, spec)

    def _input(self, x: Any, number: int) -> Any:
        if not (isinstance(x, Tensor) and x.is_floating_point() and self._draw):
            return x
        if active_casts.reference is None and x.dtype.itemsize < 4:
            self._narrow.add(number)
        return x if number in self._narrow else self._changed(x, number)


# -- a model that is as it was after whatever is done to it ------------------------------------------------------------


@contextlib.contextmanager
def untouched(root: nn.Module) -> Generator[None]:
    """Context that restores gradients, buffers, attributes and generators exactly."""
    gradients = [(p, p.grad) for p in root.parameters()]
    random, buffers = RandomState({p.device for p in root.parameters()}), buffers_of(root)
    attributes = [(module, dict(vars(module))) for module in root.modules()]
    try:
        yield
    finally:
        random.restore()
        for p, g in gradients:
            p.grad = g
        for (module, before), kept in zip(attributes, buffers, strict=True):
            _restore(module, before, kept)


def _restore(module: nn.Module, before: dict[str, Any], buffers: dict[str, Tensor]) -> None:
    found = vars(module)
    for name in found.keys() - before.keys():
        del found[name]
    found.update(before)
    held: dict[str, Tensor | None] = found["_buffers"]
    with torch.no_grad():
        for name, kept in buffers.items():
            now = held.get(name)
            if now is not None and now.shape == kept.shape:
                now.copy_(kept)
            else:
                held[name] = kept


# -- errors of several draws: sums, and coordinates that tell bias from noise ------------------------------------------

# The coordinates of an error are its parts along the reference and constant beside it, and a sketch of what is left:
# the left values themselves where they are few, else their sums over random signs, whose inner products are those of
# the values on average (a count sketch). So a draw takes the same room whatever the tensor's size.

SKETCH = 4096  # numbers; a bias below 1 / sqrt(28 * 4096), 5 % of the error's norm, is not seen with 8 draws

Key = tuple[str, str]  # collection, name
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Draw:
    """One draw of one tensor: of each time that its module was called, in order."""

    sums: ErrorSums = field(default_factory=ErrorSums)
    parts: list[tuple[float, Floats]] = field(default_factory=list[tuple[float, Floats]])  # norm, coordinates
    shapes: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])


class Draws:
    """The draws of all tensors of a model."""

    def __init__(self) -> None:
        self._found: dict[Key, list[_Draw]] = {}
        self._aliases: dict[Key, Key] = {}
        self._signs = _Signs()
        self.count = 0

    def begin(self) -> None:
        """A draw begins."""
        self.count += 1

    def forget_last(self) -> None:
        """Forget the last draw."""
        for draws in self._found.values():
            if len(draws) == self.count:
                draws.pop()
        self.count -= 1

    def take(self, collection: str, names: list[str], values: Tensor, reference: Tensor, row: Tensor) -> None:
        """Add a tensor of the present draw, which has these names."""
        key = (collection, names[0])
        self._aliases.update({(collection, name): key for name in names})
        draws = self._found.setdefault(key, [])
        while len(draws) < self.count:
            draws.append(_Draw())
        draw, sums = draws[-1], ErrorSums.from_row(row.cpu().numpy())
        draw.sums += sums
        along, constant = sums.along_reference, sums.constant
        norm = sums.referencesq**0.5
        if not np.isfinite([along, constant]).all() or norm == 0:
            return
        left = self._left_over(values, reference, sums)
        sketch = self._signs.sketch(left, len(draw.parts)) / norm
        draw.parts.append((norm, np.concatenate([[along, constant], sketch])))
        draw.shapes.append(tuple(values.shape))

    @staticmethod
    def _left_over(values: Tensor, reference: Tensor, sums: ErrorSums) -> Tensor:
        """Return the error without its parts in both directions, 0 if not finite."""
        x = reference.detach().reshape(-1)
        x = x if x.dtype == torch.float64 else x.float()
        e = values.detach().reshape(-1).to(x.dtype) - x
        # Along x and constant: e = a x + b + left, where both of the directions' parts are taken off.
        apart = sums.compared - sums.reference**2 / sums.referencesq
        along, b = sums.along_reference, 0.0
        if apart > 1e-9 * sums.compared:
            b = (sums.error - along * sums.reference) / apart
        left = e - ((along - b * sums.reference / sums.referencesq) * x + b)
        return torch.where(left.isfinite(), left, 0.0)

    def is_repeated(self) -> bool:
        """Return True if the last two draws are equal to the bit."""
        pairs = [(draws[-2].sums, draws[-1].sums) for draws in self._found.values() if len(draws) == self.count > 1]
        return bool(pairs) and all(one == other for one, other in pairs)

    def typical_error(self) -> float:
        """Return the median of tensors' nonzero relative errors in the first draw."""
        found = [draws[0].sums.relative_error for draws in self._found.values() if draws]
        found = [error for error in found if 0 < error < np.inf]
        return float(np.median(found)) if found else 0.0

    def results(self) -> dict[Key, tuple[ErrorSums, BiasAndNoise]]:
        """Return each tensor's sums, bias and noise, by all names, in step order."""
        found = {key: _split(draws) for key, draws in self._found.items()}
        return {key: found[first] for key, first in self._aliases.items()}


def _split(draws: list[_Draw]) -> tuple[ErrorSums, BiasAndNoise]:
    total = sum((draw.sums for draw in draws), ErrorSums())
    draws = [draw for draw in draws if draw.sums.compared]  # the others have no error: not called, or nothing is finite
    norms = [draw.sums.referencesq**0.5 for draw in draws]
    energies = np.array([
        draw.sums.errorsq / norm**2 if norm > 0 else (0.0 if draw.sums.errorsq == 0 else np.inf)
        for draw, norm in zip(draws, norms, strict=True)
    ])  # fmt: skip
    alike = all(draw.shapes == draws[0].shapes for draw in draws)
    rows: list[Floats] = []
    for draw, norm in zip(draws, norms, strict=True):
        parts = [part * (own / norm) if norm > 0 else part for own, part in draw.parts]
        # Batches of other shapes have no elements in common: the two directions alone mean the same in each.
        rows.append(np.concatenate(parts) if alike and parts else sum((part[:2] for part in parts), np.zeros(2)))
    width = max((len(row) for row in rows), default=2)
    whole = np.array([row if len(row) == width else np.zeros(width) for row in rows])
    sketched = any(len(part) == SKETCH + 2 for draw in draws for _, part in draw.parts)
    finite = np.isfinite(energies)
    if not finite.any():
        return total, split(np.zeros((len(draws), 2)), energies)
    return total, split(whole[finite], energies[finite], sketched=SKETCH if sketched else 0)


class _Signs:
    """Random signs, the same for all tensors of a size."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.device, int], Tensor] = {}

    def sketch(self, left: Tensor, call: int) -> Floats:
        """Return the values, or if they are many, sums over the random signs of `call`."""
        count = left.numel()
        if count <= SKETCH:
            return left.double().cpu().numpy()
        rows = -(-count // SKETCH)
        padded = torch.nn.functional.pad(left, (0, rows * SKETCH - count)).reshape(rows, SKETCH)
        summed = (padded * self._of(left.device, rows).roll(call, 1)).sum(0, dtype=torch.float64).cpu().numpy()
        # A sketch's own norm is off by a few per cent. The norm of what it stands for is known.
        norm, own = float(left.double().square().sum().sqrt()), float(np.linalg.norm(summed))
        return summed * (norm / own) if own > 0 else summed

    def _of(self, device: torch.device, rows: int) -> Tensor:
        held = self._held.get((device, SKETCH))
        if held is None or len(held) < rows:
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(0, 2, (rows, SKETCH), generator=generator, dtype=torch.int8, device="cpu")
            held = self._held[device, SKETCH] = (2 * drawn - 1).to(device)
        return held[:rows]
