"""`microscope`: errors of a low-precision step against a wide format's."""

import math
import tempfile
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from plimsoll import checks
from plimsoll.errors import ArgumentError, PlimsollError, StateError
from plimsoll.formats import get
from plimsoll.microscope.blame.search import Blamer
from plimsoll.microscope.closure_shadow import ClosureShadow
from plimsoll.microscope.draws import Draws, Perturbation, untouched
from plimsoll.microscope.report import SHADOWED, ErrorReport, ErrorRow
from plimsoll.text import clause
from plimsoll.watch import watch
from plimsoll.watch.names import unwrapped
from plimsoll.watch.session import watches_muted

WIDE = {"fp32": torch.float32, "fp64": torch.float64}

Closure = Callable[[], Any]


def microscope(
    model: nn.Module,
    step: Closure | Sequence[Closure],
    *,
    reference: object = "fp32",
    draws: int = 8,
    collect: Iterable[str] = SHADOWED,
) -> ErrorReport:
    """Return the errors of a model's step, by tensor, against a wide format's.

    The step is made as it is (under autocast, emulated, with FP8 layers, 16-bit weights, compiled, as the closure has
    it), and once more as its reference: weights widened, nothing cast, the same random numbers. Each tensor's error is
    split into bias, which stays from draw to draw, and noise.

    A draw is another batch: give one closure for each. With one closure alone draws differ by the step's random numbers
    (dropout, stochastic rounding); without any, and when closures come to their second turn, by small changes of the
    weights and the model's float inputs, as large as the error itself.

    Nothing stays: weights, gradients, buffers, random generators and the modules' attributes are as before.

    Args:
        model: The model, compiled or not. It is used in the mode that it is in, training or evaluation.
        step: Closure that calls the model and returns the loss of one batch, the same each time; or several. It calls
            no backward and no optimizer.
        reference: "fp32" or "fp64".
        draws: Number of draws, at least 3. Default: 8.
        collect: What to compare, among "activations", "activation_gradients" and "gradients" (of parameters).

    Returns:
        The report, with a row for each tensor. `ErrorReport.blame` says what the error comes from.

    Raises:
        ArgumentError: An argument cannot be, or a closure fetches another batch each time.
        StateError: The reference does not fit into memory, or cannot be computed.

    >>> import plimsoll as pl
    >>> _ = torch.manual_seed(0)
    >>> model, batches = nn.Linear(64, 64), torch.randn(4, 32, 64)
    >>> def step(x):
    ...     with torch.autocast("cpu", dtype=torch.bfloat16):
    ...         return model(x).float().square().mean()
    >>> report = pl.microscope(model, [lambda x=x: step(x) for x in batches], draws=4)
    >>> row = report.row("model:output", "activations")
    >>> round(row.relative_error, 3), row.is_bias
    (0.003, False)
    """
    closures = _closures(step)
    wide = _wide(reference)
    checks.integer("microscope", "draws", draws, low=3, remedy="Bias and noise need three at least: use 8.")
    chosen = _collections(collect)
    _check_place(model)
    root = unwrapped(model)
    found = Draws()
    with untouched(root), watches_muted(), tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        w = watch(
            model, run=Path(folder) / "run", every=1 << 30, collect=chosen, recorder=(), shadow_every=1,
            max_bytes=1 << 62, quiet=True,
        )  # fmt: skip
        try:
            shadow = _replaced(w, root, wide, found)
            varied, losses = _all_draws(root, closures, draws, found, lambda closure: _draw(w, shadow, closure))
        finally:
            w.close()
    rows = tuple(_row(*key, *result) for key, result in found.results().items() if key[0] in chosen)
    blamer = Blamer(weakref.ref(root), closures, wide, found.typical_error())
    return ErrorReport(
        rows=rows, reference=get(reference).name, draws=found.count, varied=varied, losses=tuple(losses), blamer=blamer
    )


def _all_draws(
    root: nn.Module, closures: list[Closure], draws: int, found: Draws, make: Callable[[Closure], float]
) -> tuple[str, list[float]]:
    """Make the draws; return what differed between them, and their losses."""
    perturbation: Perturbation | None = None
    losses: list[float] = []
    varied = "batches" if len(closures) > 1 else "random numbers"
    try:
        while found.count < draws:
            turn, place = divmod(found.count, len(closures))
            if perturbation is not None:
                perturbation.draw()
            found.begin()
            losses.append(make(closures[place]))
            repeats = turn == 1 and place == 0 and perturbation is None
            if repeats and (len(closures) > 1 or found.is_repeated()):
                found.forget_last()
                losses.pop()
                perturbation = Perturbation(root, found.typical_error())
                varied = "weights" if len(closures) == 1 else varied
    finally:
        if perturbation is not None:
            perturbation.undo()
    return varied, losses


def _draw(w: Any, shadow: ClosureShadow, closure: Closure) -> float:
    root = shadow.session.model()
    assert root is not None
    for p in root.parameters():
        p.grad = None
    loss = shadow.run(closure)
    w.step()
    return float(loss)


def _replaced(w: Any, root: nn.Module, wide: torch.dtype, found: Draws) -> ClosureShadow:
    """Give the watch the shadow of closures in place of its own."""
    session, steps = w._session, w._steps  # noqa: SLF001  (a watch that this function has made)
    session.shadow.detach()
    session.shadow = shadow = ClosureShadow(session, root, steps.begin, wide, found.take)
    steps.taps.takes_eval_forward = True

    def fail(where: str, error: Exception, **_: object) -> None:
        if isinstance(error, PlimsollError):
            raise error
        raise StateError(
            f"microscope: expected {where} to work; got {type(error).__name__}: {clause(error)}."
        ) from error

    session.failed = fail  # a training goes on without what fails; here it is what was asked for
    return shadow


def _row(collection: str, name: str, sums: Any, errors: Any) -> ErrorRow:
    return ErrorRow(
        name=name,
        collection=collection,
        relative_error=errors.relative_error,
        bias=errors.bias,
        noise=errors.noise,
        snr_db=sums.snr_db if sums.compared else math.nan,
        cosine=sums.cosine,
        along_reference=sums.along_reference,
        largest_error=sums.largest_error,
        made_nonfinite=int(sums.made_nonfinite),
        reference_nonfinite=int(sums.reference_nonfinite),
        values=int(sums.compared),
    )


def _closures(step: Any) -> list[Closure]:
    listed: list[Any] = [step] if callable(step) else [*step] if isinstance(step, Sequence) else []
    if not listed or not all(map(callable, listed)):
        raise ArgumentError(
            f"microscope: expected step to be a closure that returns the loss of one batch, or several; got {step!r}. "
            "Write lambda: loss_of(model(x), y)."
        )
    return cast("list[Closure]", listed)


def _wide(reference: object) -> torch.dtype:
    name = get(reference).name
    if name not in WIDE:
        raise ArgumentError(
            f"microscope: expected reference to be one of {', '.join(WIDE)}; got reference={reference!r}. A reference "
            "is wider than what it judges."
        )
    return WIDE[name]


def _collections(collect: object) -> tuple[str, ...]:
    several = cast("Iterable[Any]", collect if isinstance(collect, Iterable) else ())
    given = (collect,) if isinstance(collect, str) else tuple(several)
    strange = [name for name in given if name not in SHADOWED]
    if strange or not given:
        raise ArgumentError(
            f"microscope: expected collect to name some of {', '.join(SHADOWED)}; got collect={collect!r}. Choose "
            "among these."
        )
    return given


def _check_place(model: Any) -> None:
    distributed: Any = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise ArgumentError(
            f"microscope: expected one process; got world_size={distributed.get_world_size()}. Record errors of a "
            "distributed training with plimsoll.watch(..., shadow_every=...)."
        )
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"microscope: expected a torch.nn.Module as model; got {type(model).__name__}. Give the module itself."
        )
    checks.initialized("microscope", model)
    if not any(p.requires_grad and not p.is_meta for p in model.parameters()):
        raise ArgumentError(
            f"microscope: expected a model with parameters that have values and require gradients; got "
            f"{type(model).__name__} without any. Load its weights, or let some require gradients."
        )
