"""Experiment `audit` (U1, U2, U5): the scale of every operation of a transformer, before and after its conversion.

A small pre-norm transformer for characters, of torch's own modules as torch draws them, is audited on a batch of text;
converted by `unit.convert`; audited again; trained at unit scale, without a loss scale, and audited once more. What
formats lose is asked of all values with no scale at all: that is what the conversion is for.

What the factors cost is counted at the sizes of BERT-large, where nothing is computed (`cost`).

Beside the runs it leaves the figure (``report-audit.html``), and in ``runs/audit`` the tables and all rows as JSON.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from plimsoll.diagnosis import diagnose
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.unit import audit, convert, optim
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.audit.analysis import Audits, claims, numbers, said
from plimsoll_lab.experiments.audit.cost import BERT_LARGE, added_share
from plimsoll_lab.experiments.unit.model import Plain
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.source_text import Batch, make_batch, standard_library
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment

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
    if steps is not None and steps < _FEWEST_STEPS:
        raise ArgumentError(
            f"lab audit: expected {_FEWEST_STEPS} steps or more, so that scales have time to drift; got {steps}. "
            f"Use {whole.steps}."
        )
    return whole if steps is None else replace(whole, steps=steps)


def measure(bench: Bench) -> Measured:
    """The three audits and the training between them, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full))


def measure_with(bench: Bench, setup: Setup, costed: Mapping[str, int] = BERT_LARGE) -> Measured:
    """Likewise, with sizes of one's own; `costed`: those at which the added operations are counted."""
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
