"""Experiment `audit` (U1, U2, U5): operations' scales before and after conversion.

A small pre-norm transformer for characters, of torch's own modules as torch draws them, is audited on a batch of text;
converted by `unit.convert`; audited again; trained at unit scale, without a loss scale, and audited once more. What
formats lose is asked of all values with no scale at all: that is what the conversion is for.

What the factors cost is counted at the sizes of BERT-large, where nothing is computed (`cost`).

Beside the runs it leaves the figure (``report-audit.html``), and in ``runs/audit`` the tables and all rows as JSON.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from plimsoll.diagnosis import diagnose
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent
from plimsoll.unit import Audit, Reading, audit, convert, optim
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.unit.model import Plain, Unit
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.source_text import Batch, make_batch, standard_library
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment, check_steps

BERT_LARGE = {"width": 1024, "layers": 24, "heads": 16, "length": 512}
_ARITHMETIC = ("add", "sub", "mul", "div", "rsub")


class _Arithmetic(TorchDispatchMode):
    """Counter of the values that sums, differences, products and quotients give."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__.rstrip("_") in _ARITHMETIC and isinstance(given, Tensor):
            self.values += given.numel()
        return given


def added_share(**sizes: int) -> float:
    """Return the operations added at unit scale, as a share of those without it."""
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


_NEAR, _FAR = 2.0, 4.0  # binades from unit scale
_COST = 0.0025  # published as 0.2 %, and so at most half a tenth of a per cent above it
_TAIL = 10  # losses that one is the mean of
# FP8 as it trains: E4M3 for what goes forward, E5M2 for gradients.
_FORMAT_OF = {"activations": "e4m3", "activation_gradients": "e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audits:
    """The model as torch drew it, converted, and converted and trained."""

    before: Audit
    after: Audit
    trained: Audit


def numbers(audits: Audits, run: Run) -> dict[str, float]:
    """By name: how far scales lie from 1, what formats lose, and the loss."""
    found: dict[str, float] = {}
    for when, each in (("before", audits.before), ("after", audits.after), ("trained", audits.trained)):
        forward, backward = each.total("forward"), each.total("backward")
        found |= {
            f"farthest_{when}": max(r.distance for r in each.worst),
            f"within_{when}": _share(each, _NEAR, within=True),
            f"gradients_far_{when}": _share(each, _FAR, within=False, backward=True),
            f"forward_e4m3_lost_{when}": forward.fit("e4m3").lost.estimate,
            f"backward_e5m2_lost_{when}": backward.fit("e5m2").lost.estimate,
            f"backward_fp16_lost_{when}": backward.fit("fp16").lost.estimate,
        }
    loss = run.scalars("loss")[1]
    found |= _over_the_run(run)
    found |= {"loss_begin": float(loss[0]), "loss_end": float(np.mean(loss[-_TAIL:]))}
    found["lost_after"] = found["backward_e5m2_lost_trained"]
    return found


def _share(audit: Audit, binades: float, *, within: bool, backward: bool = False) -> float:
    chosen = audit.readings("backward" if backward else None)
    readings = [r for r in chosen if r.spoiled or not math.isnan(r.scale)]  # what holds no number lies nowhere near
    near = sum(r.distance <= binades for r in readings) / len(readings)
    return near if within else 1.0 - near


def _over_the_run(run: Run) -> dict[str, float]:
    """Return the largest shares over the steps that FP8 cuts off, and that it loses."""
    cut, totals = 0.0, dict[tuple[int, str], Spectrum]()
    for collection, fmt in _FORMAT_OF.items():
        for step, _, _, spectrum in run.spectra(collection):
            cut = max(cut, spectrum.fit(fmt).overflow.estimate)
            totals[step, fmt] = totals.get((step, fmt), Spectrum.empty()) + spectrum
    lost = max(total.fit(fmt).lost.estimate for (_, fmt), total in totals.items())
    return {"cut_off_in_training": cut, "lost_in_training": lost}


def claims(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Return the experiment's claims, with their numbers."""
    return (
        *of_rows(_of_the_beginning(found), "U1", "U2"),
        *of_rows(_of_drift(found), "U5"),
        *of_rows(_of_training(found), "U1"),
        *of_rows(_of_cost(found), "U5"),
    )


def _of_the_beginning(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Before the conversion, and after it."""
    return claims_of(
        """
        before-far | found.gradients_far_before | at least 0.9 of operations
            | before: gradients lie more than 4 binades from unit scale
        before-lost | found.backward_e5m2_lost_before | at least 0.3 of values
            | before: E5M2 without a scale loses much of the gradients
        after-near | found.within_after | at least 0.98 of operations, forward and backward
            | after: values and gradients of the operations lie within 2 binades of unit scale
        after-farthest | found.farthest_after | at most 3.5 binades | after: none lies far from it
        after-e4m3 | found.forward_e4m3_lost_after | at most 0.005 of values lost
            | after: E4M3 without a scale holds the values
        after-e5m2 | found.backward_e5m2_lost_after | at most 0.005 of values lost
            | after: E5M2 without a scale holds the gradients
        after-fp16 | found.backward_fp16_lost_after | at most 0.001 of values lost
            | after: FP16 without a scale holds the gradients
        """,
        found=found,
    )


def _of_drift(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """In training."""
    return claims_of(
        """
        drift-cuts-nothing | found.cut_off_in_training | at most 0.001 of values, in the worst tensor
            | in training: no tensor drifts above what FP8 holds
        drift-loses-little | found.lost_in_training | at most 0.02 of values, at the worst step
            | in training: scales do not drift below what FP8 holds
        """,
        found=found,
    )


def _of_training(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Without a loss scale."""
    return claims_of(
        """
        trains | found.loss_end / found.loss_begin | at most 0.75 of the first loss
            | it trains, without a loss scale
        """,
        found=found,
    )


def _of_cost(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Of the factors."""
    return claims_of(
        f"""
        costs-little | found.operations_added | at most {_COST} of the step's operations
            | at BERT-large's sizes few operations are added (published: 0.2 %)
        """,
        found=found,
    )


def said(audits: Audits, figure: str) -> tuple[str, ...]:
    """Sentences about what was found."""
    before, after = audits.before, audits.after
    lost = [audit.total("backward").fit("e5m2").lost.estimate for audit in (before, after)]
    scales = (
        f"Before the conversion {len(before.beyond(_FAR))} of {sum(1 for _ in before.readings())} values and gradients "
        f"lie more than {_FAR:.0f} binades from unit scale, after it {len(after.beyond(_FAR))}. E5M2 without a scale "
        f"loses {percent(lost[0], 1)} of the gradients' values before, {percent(lost[1], 2)} after."
    )
    worst = (
        f"The worst before: {_worst(before.worst[0])}; after: {_worst(after.worst[0])}; trained: "
        f"{_worst(audits.trained.worst[0])}. Every operation: {figure}."
    )
    return scales, worst


def _worst(reading: Reading) -> str:
    return f"{reading.row.name} {reading.direction} 2^{reading.scale:.1f}"


FIGURE, FOLDER = "report-audit.html", "audit"
_FEWEST_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment."""

    steps: int = 200
    width: int = 128
    layers: int = 4
    heads: int = 4
    length: int = 64
    pieces: int = 16
    learning_rate: float = 0.5
    every: int = 10


class Trained(Plain):
    """The plain model with its loss, so that the loss is converted too."""

    def forward(self, characters: Tensor, targets: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean loss."""
        return self.loss(super().forward(characters), targets)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=2000, width=256, layers=8, heads=8, length=128) if full else Setup()
    if steps is None:
        return whole
    check_steps("audit", steps, _FEWEST_STEPS, whole.steps, ", so that scales have time to drift")
    return replace(whole, steps=steps)


def measure(bench: Bench) -> Measured:
    """The three audits and the training between them, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full))


def measure_with(bench: Bench, setup: Setup, costed: Mapping[str, int] = BERT_LARGE) -> Measured:
    """Do the same with your own sizes; `costed`: those of the counted operations."""
    text = standard_library()

    def batch(step: int) -> tuple[Tensor, Tensor]:
        drawn = make_batch(text, bench.seed, step, pieces=setup.pieces, length=setup.length)
        return _on(drawn, bench.device)

    bench.progress.begin("audits", 3)
    model = Trained(width=setup.width, layers=setup.layers, heads=setup.heads, length=setup.length).to(bench.device)
    before = audit(model, batch(0))
    bench.progress.advance()
    converted = convert(model, batch(0), seed=bench.seed)
    after = audit(converted, batch(0))
    bench.progress.advance()
    folder = bench.runs / "unit-scaled"
    _train(converted, setup, batch, folder, bench)
    audits = Audits(before=before, after=after, trained=audit(converted, batch(0)))
    bench.progress.advance()
    _leave(audits, bench.runs)
    training = _training(Run(folder), audits, added_share(**costed))
    return Measured(trainings=(training,), claims=claims(training.numbers), said=said(audits, FIGURE))


def _train(
    model: nn.Module, setup: Setup, batch: Callable[[int], tuple[Tensor, Tensor]], folder: Path, bench: Bench
) -> None:
    """Trains at unit scale in FP32, without a loss scale, watched into a run."""
    bench.progress.begin("training at unit scale", setup.steps)
    optimizer = optim.AdamW(model, lr=setup.learning_rate)
    with watch(model, optimizer, run=folder, every=setup.every):
        for step in range(setup.steps):
            optimizer.zero_grad()
            model(*batch(step)).backward()
            optimizer.step()
            bench.progress.advance()


def _training(run: Run, audits: Audits, added: float) -> Training:
    steps, loss = run.scalars("loss")
    found = numbers(audits, run) | {"operations_added": added}
    fell = found["loss_end"] < found["loss_begin"]
    return Training(
        name=run.path.name, title="at unit scale, no loss scale", run=run.path, numbers=found,
        outcome="trains" if fell else "does not train", good=fell,
        series=columns(steps, loss), series_of="loss", findings=tuple(diagnose(run)),
    )  # fmt: skip


def _leave(audits: Audits, runs: Path) -> None:
    """The figure, the tables and the rows, for whoever wants to look closer."""
    comparison = audits.before.compare(audits.after)
    comparison.figure().write_html(runs.parent / FIGURE)
    folder = runs / FOLDER
    folder.mkdir()
    named = {"before": audits.before, "after": audits.after, "trained": audits.trained}
    tables = [f"{name}: {one}" for name, one in named.items()]
    (folder / "tables.txt").write_text("\n\n".join([str(comparison), *tables]) + "\n", "utf-8")
    rows = {name: one.to_dict() for name, one in named.items()}
    (folder / "audits.json").write_text(
        json.dumps({**rows, "compared": comparison.to_dict()}, allow_nan=False), "utf-8"
    )


def _on(batch: Batch, device: str) -> tuple[Tensor, Tensor]:
    return batch.inputs.to(device), batch.targets.to(device)


def _settings(bench: Bench) -> Mapping[str, object]:
    setup = setup_for(bench.steps, full=bench.full)
    return {**asdict(setup), "device": bench.device, "text_sha256": standard_library().sha256}


AUDIT = Experiment(
    name="audit",
    claim="Converted, every operation of a transformer starts near unit scale, and stays where FP8 holds it.",
    source="U1, U2, U5",
    settings=_settings,
    measure=measure,
)
