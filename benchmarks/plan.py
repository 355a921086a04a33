"""Plans by consequence against real trainings: predicted and measured rise of the loss at the same number of bits.

Each model is trained in FP32, watched, and under each plan, emulated, from the same weights and on the same batches,
for several seeds. All plans have six bits for each value that is cast. A module has one of three formats in each
direction, which split the bits differently between range and digits. The penalty is the paired difference of the mean
loss over the last quarter of the steps. Four models were used to develop the prediction. The others were not.
"""

import argparse
import contextlib
import functools
import itertools
import json
import math
import operator
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from _harness import Results
from numpy.typing import NDArray
from scipy.stats import kendalltau
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import View
from plimsoll.diagnosis.planning.format_choice import Judge
from plimsoll.diagnosis.planning.loss_forecast import Consequence, Forecast
from plimsoll.diagnosis.planning.modules import Module, modules_of
from plimsoll.formats import ROLES, Plan, Role, get
from plimsoll.spectrum import Interval

FORMATS = ("e2m3", "e3m2", "e4m1")  # of six bits, those with more digits first
BATCH = 64
TOLERANCE = 0.01  # of the range-only plan
GOALS = {"tau": 0.8, "held": 0.9}


# -- models


class Residual(nn.Module):
    """A residual network with two norms a block."""

    def __init__(self, width: int = 48, blocks: int = 4, classes: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * blocks)])
        self.ups = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.downs = nn.ModuleList([nn.Linear(width, width) for _ in range(blocks)])
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.first(x)
        for i, (up, down) in enumerate(zip(self.ups, self.downs, strict=True)):
            x = x + self.norms[2 * i + 1](down(F.gelu(up(self.norms[2 * i](x)))))
        return self.head(self.last(x))


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream with attention and MLP added."""
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Position(nn.Module):
    """Learned addend of each place in a sequence."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(places, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sequences with the addends."""
        return x + self.weight


class Transformer(nn.Module):
    """A causal transformer of two blocks."""

    def __init__(self, width: int = 32, words: int = 24) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(words, width), Position(8, width)
        self.blocks = nn.ModuleList([Attention(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        h = self.pos(self.tok(x))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Lstm(nn.Module):
    """An LSTM of linear layers, whose products can be planned for."""

    def __init__(self, width: int = 32, words: int = 24) -> None:
        super().__init__()
        self.tok, self.width = nn.Embedding(words, width), width
        self.inner, self.outer, self.head = (
            nn.Linear(width, 4 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(width, words),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        outer = self.outer(self.tok(x))
        h = c = torch.zeros(len(x), self.width)
        states = []
        for step in range(x.shape[1]):
            i, f, g, o = (self.inner(h) + outer[:, step]).chunk(4, -1)
            c = (f + 1).sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            states.append(h)
        return self.head(torch.stack(states, 1))


def mlp(*widths: int) -> nn.Module:
    """Return linear layers with ReLU between."""
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Return three convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, padding=1, stride=2), nn.BatchNorm2d(24),
        nn.ReLU(), nn.Conv2d(24, 32, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


# -- several networks as one, which takes their batches one after the other


class Stacked(nn.Module):
    """A layer of several networks, each of which has its own part of the batch."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.like, self.networks = (layers[0],), len(layers)  # a tuple hides the layer from `named_modules`
        for name, _ in layers[0].named_parameters():
            setattr(self, name, nn.Parameter(torch.stack([layer.get_parameter(name).detach() for layer in layers])))

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of all networks, one after the other."""
        layer, weight, bias = self.like[0], self.weight, getattr(self, "bias", None)
        x = x.unflatten(0, (self.networks, -1))
        if isinstance(layer, nn.Embedding):
            return weight[torch.arange(self.networks).view(-1, *[1] * (x.dim() - 1)), x].flatten(0, 1)
        if isinstance(layer, Position):
            return (x + weight[:, None]).flatten(0, 1)
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            rows = x.flatten(1, -2)
            linear = isinstance(layer, nn.Linear)
            y = rows @ weight.mT if linear else F.layer_norm(rows, rows.shape[-1:]) * weight[:, None]
            return (y + bias[:, None]).reshape(-1, *x.shape[2:-1], y.shape[-1])
        channels, own = x.transpose(0, 1).flatten(1, 2), (weight.flatten(0, 1), bias.flatten())
        y = (
            F.conv2d(channels, *own, layer.stride, layer.padding, groups=self.networks)
            if isinstance(layer, nn.Conv2d)
            else F.batch_norm(channels, None, None, *own, training=True)
        )
        return y.unflatten(1, (self.networks, -1)).transpose(0, 1).flatten(0, 1)


def stacked(networks: Sequence[nn.Module]) -> nn.Module:
    """Return one network that computes as all of these do."""
    for name, layer in [*networks[0].named_modules()]:
        if [*layer.parameters(recurse=False)]:
            networks[0].set_submodule(name, Stacked([network.get_submodule(name) for network in networks]))
    return networks[0]


# -- data: endless batches, the same for the same seed

Batches = Callable[[torch.Generator], Iterator[tuple[Tensor, Tensor]]]


def teacher(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Classes of a random network, a tenth of them wrong."""
    own = torch.Generator().manual_seed(99)
    first, second = torch.randn(32, 24, generator=own) / 32**0.5, torch.randn(24, 10, generator=own)
    while True:
        x = torch.randn(BATCH, 32, generator=generator)
        y = ((x @ first).tanh() @ second).argmax(1)
        other = torch.randint(0, 10, (BATCH,), generator=generator)
        yield x, torch.where(torch.rand(BATCH, generator=generator) < 0.1, other, y)


SEGMENTS = (
    "1110111",
    "0010010",
    "1011101",
    "1011011",
    "0111010",
    "1101011",
    "1101111",
    "1010010",
    "1111111",
    "1111011",
)
STROKES = (
    (0, slice(1, 4)),
    (slice(1, 3), 0),
    (slice(1, 3), 4),
    (3, slice(1, 4)),
    (slice(4, 6), 0),
    (slice(4, 6), 4),
    (6, slice(1, 4)),
)


def digits(image: bool) -> Batches:
    """Digits of seven segments on 8 x 8 pixels, moved by up to a pixel, in noise."""
    drawn = torch.zeros(10, 7, 5)
    for digit, code in enumerate(SEGMENTS):
        for stroke, lit in zip(STROKES, code, strict=True):
            drawn[(digit, *stroke)] = float(lit)

    def batches(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            y = torch.randint(0, 10, (BATCH,), generator=generator)
            x = 0.6 * torch.randn(BATCH, 8, 8, generator=generator)
            down, right = (torch.randint(0, 1 + room, (BATCH,), generator=generator) for room in (1, 3))
            for i in range(BATCH):
                x[i, down[i] : down[i] + 7, right[i] : right[i] + 5] += drawn[y[i]]
            yield (x[:, None] if image else x.flatten(1)), y

    return batches


def chain(generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences in which each word depends on the two before it."""
    own = torch.Generator().manual_seed(98)
    mostly, also = torch.randn(24, 1, 24, generator=own), torch.randn(1, 24, 24, generator=own)
    table = (mostly + 2 * also).softmax(-1)  # [before the last, last, next]
    while True:
        words = [torch.randint(0, 24, (BATCH // 2,), generator=generator) for _ in range(2)]
        for _ in range(7):
            words.append(torch.multinomial(table[words[-2], words[-1]], 1, generator=generator).squeeze(1))
        sequence = torch.stack(words, 1)
        yield sequence[:, :-1], sequence[:, 1:]


@dataclass(frozen=True)
class Model:
    """A model, its data, and its training."""

    make: Callable[[], nn.Module]
    batches: Batches
    rate: float
    adam: bool = True
    developed: bool = False  # whether the prediction was developed on it


MODELS = {
    "MLP": Model(lambda: mlp(32, 64, 64, 64, 10), teacher, 3e-3, developed=True),
    "residual, norms": Model(Residual, teacher, 3e-3, developed=True),
    "transformer": Model(Transformer, chain, 3e-3, developed=True),
    "MLP, SGD": Model(lambda: mlp(32, 96, 48, 10), teacher, 0.1, adam=False, developed=True),
    "digits": Model(lambda: mlp(64, 64, 64, 10), digits(False), 2e-3),
    "CNN": Model(cnn, digits(True), 2e-3),
    "LSTM": Model(Lstm, chain, 4e-3),
    "CNN, SGD": Model(cnn, digits(True), 0.05, adam=False),
    "residual, norms, SGD": Model(Residual, teacher, 0.05, adam=False),
}


def train(model: Model, seeds: int, steps: int, plan: Plan | None = None, run: Path | None = None) -> list[float]:
    """Return each seed's mean loss of the last quarter of the steps. A run records the first seed alone."""
    networks: list[nn.Module] = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        networks.append(model.make())
    network = stacked(networks) if run is None else networks[0]
    optimizer = (
        torch.optim.Adam(network.parameters(), lr=model.rate)
        if model.adam
        else torch.optim.SGD(network.parameters(), lr=model.rate, momentum=0.9)
    )
    watch = None if run is None else pl.watch(network, optimizer, run=run, every=max(steps // 12, 1), warmup=10)
    emulated = contextlib.nullcontext() if plan is None else pl.emulate(plan, model=network)
    losses: list[Tensor] = []
    batches = [model.batches(torch.Generator().manual_seed(1000 + seed)) for seed in range(seeds)]
    for drawn in itertools.islice(zip(*batches, strict=True), steps):
        x, y = map(torch.cat, zip(*drawn, strict=True))
        optimizer.zero_grad()
        with emulated:
            out = network(x)
        each = F.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="none").view(seeds, -1).mean(1)
        each.sum().backward()
        if watch is not None:
            watch.log(loss=each[0].detach())
        optimizer.step()
        losses.append(each.detach())
    if watch is not None:
        watch.close()
    return torch.stack(losses[-steps // 4 :]).double().mean(0).tolist()


# -- plans of six bits

Pairs = list[tuple[str, str]]  # formats of each module


class Planner:
    """Plans of a recorded run with given formats, and their predictions."""

    def __init__(self, run: Path) -> None:
        view = View(pl.Run(run))
        self.judge = Judge(view, tolerance=TOLERANCE, margin=None)
        self.modules = modules_of(view)
        self.forecast = Forecast(view, self.judge, self.modules)

    def shifts(self, module: Module, forward: str, backward: str) -> dict[Role, int]:
        """Return scales as `plan` chooses them, with two more binades where overflow is infinite."""
        found: dict[Role, int] = {}
        for role in ROLES:
            fmt = get(backward if role == "gradients" else forward)
            windows = [c.window(names, fmt) for c, names in self.judge.series(module, role, forward, backward)]
            window = functools.reduce(operator.and_, windows)
            spare = max(
                c.spare(names, self.judge.trained) for c, names in self.judge.series(module, role, forward, backward)
            )
            found[role] = self.judge.best(window, max(1, math.ceil(spare)) + 2 * fmt.has_inf)
        return found

    def plan(self, pairs: Pairs) -> Plan:
        """Return the plan of these formats."""
        chosen = dict(zip(self.modules, pairs, strict=True))
        return Plan(
            target="six bits",
            formats={m.name: f for m, (f, _) in chosen.items()},
            backward={m.name: b for m, (_, b) in chosen.items()},
            scales={m.name: {r: 2.0**k for r, k in self.shifts(m, *pair).items()} for m, pair in chosen.items()},
        )

    def predicted(self, pairs: Pairs) -> Interval:
        """Return the predicted rise of the loss."""
        return self.forecast.total(self._of(m, *pair) for m, pair in zip(self.modules, pairs, strict=True))

    def lost(self, pairs: Pairs) -> float:
        """Return the share of values that round to zero, which is what a plan by range goes by."""
        found = [
            self.judge.loss_counts(m, role, pair, self.shifts(m, *pair)[role]).fraction.estimate
            for m, pair in zip(self.modules, pairs, strict=True)
            for role in ROLES
        ]
        return statistics.fmean(found)

    def best(self) -> Pairs:
        """Return the formats of least predicted increase."""
        every = [*itertools.product(FORMATS, FORMATS)]
        return [min(every, key=lambda pair, m=m: self._of(m, *pair).increase) for m in self.modules]

    def by_range(self) -> Pairs:
        """Return the first format, those with more digits first, that loses little, as `plan` does for a family."""
        return [(self._first(m, "forward"), self._first(m, "backward")) for m in self.modules]

    def _first(self, module: Module, direction: str) -> str:
        roles: tuple[Role, ...] = ("gradients",) if direction == "backward" else ("weights", "activations")
        for fmt in FORMATS:
            shifts = self.shifts(module, fmt, fmt)
            found = [self.judge.loss_counts(module, role, (fmt, fmt), shifts[role]).fraction.low for role in roles]
            if max(found) < TOLERANCE:
                return fmt
        return FORMATS[-1]

    def _of(self, module: Module, forward: str, backward: str) -> Consequence:
        found = self.forecast.of(module.name, forward, backward, self.shifts(module, forward, backward))
        assert found is not None
        return found


def plans_of(planner: Planner, mixes: int) -> dict[str, Pairs]:
    """Return the plans of a model by name."""
    count, chance = len(planner.modules), random.Random(5)
    found = {fmt: [(fmt, fmt)] * count for fmt in FORMATS}
    found |= {f"{f}/{b}": [(f, b)] * count for f, b in (("e3m2", "e4m1"), ("e4m1", "e3m2"), ("e2m3", "e4m1"))}
    found |= {
        f"mix {i + 1}": [(chance.choice(FORMATS), chance.choice(FORMATS)) for _ in range(count)] for i in range(mixes)
    }
    return {**found, "by range": planner.by_range(), "by consequence": planner.best()}


class Trainings:
    """Losses of trainings by plan, kept in a file so that a second call trains only what is new."""

    def __init__(self, model: Model, seeds: int, steps: int, file: Path) -> None:
        self._model, self._steps, self._file = model, steps, file
        self._losses: dict[str, list[float]] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        self.seeds = max(seeds, len(self._losses.get(self._key(None), [])))

    def losses(self, plan: Plan | None = None) -> list[float]:
        """Return each seed's mean loss of the last quarter of the steps. No plan: FP32."""
        key = self._key(plan)
        if len(self._losses.get(key, [])) < self.seeds:
            self._losses[key] = train(self._model, self.seeds, self._steps, plan)
            self._file.write_text(json.dumps(self._losses), encoding="utf-8")
        return self._losses[key]

    def _key(self, plan: Plan | None) -> str:
        return f"{self._steps} steps, {plan and (plan.formats, plan.backward, plan.scales)}"


def measure(name: str, seeds: int, steps: int, mixes: int, keep: Path) -> dict[str, Any]:
    """Return the plans of one model, predicted and measured, in per cent of the FP32 loss."""
    trainings, run = Trainings(MODELS[name], seeds, steps, keep / f"{name}.json"), keep / f"{name}, {steps} steps"
    if not run.exists():
        with tempfile.TemporaryDirectory(dir=keep) as folder:  # a call that ends early leaves no half of a run
            train(MODELS[name], 1, steps, run=Path(folder) / "run")
            (Path(folder) / "run").rename(run)
    planner, base = Planner(run), trainings.losses()
    level, rows, rises = statistics.fmean(base), list[dict[str, object]](), list[list[float]]()
    for label, pairs in plans_of(planner, mixes).items():
        rise = planner.predicted(pairs)
        found = [(a - b) / level for a, b in zip(trainings.losses(planner.plan(pairs)), base, strict=True)]
        rises.append(found)
        broken = not all(map(math.isfinite, found))
        rows.append({
            "plan": label, "predicted %": 100 * rise.estimate, "low %": 100 * rise.low, "high %": 100 * rise.high,
            "measured %": math.inf if broken else 100 * statistics.fmean(found),
            "standard error %": 0.0 if broken else 100 * statistics.stdev(found) / math.sqrt(len(base)),
            "values lost %": 100 * planner.lost(pairs),
        })  # fmt: skip
    note = f"FP32 loss {level:.3f}, {len(base)} seeds, {steps} steps."
    return {"note": note, "rows": rows, "ceiling": _ceiling(np.array(rises))}


def _ceiling(rises: NDArray[np.float64]) -> float:
    """Return Kendall's tau of the order of plans (by seed) and their order measured again with other seeds.

    It is the mean over measurements drawn from the seeds' covariance. No prediction has a higher tau on average.
    """
    means, seeds, chance = rises.mean(1), rises.shape[1], np.random.default_rng(0)
    noise = (rises - means[:, None]) / math.sqrt(seeds * (seeds - 1))
    draws = [means + (noise * chance.standard_normal(seeds)).sum(1) for _ in range(500)]
    return statistics.fmean(float(kendalltau(means, drawn).statistic) for drawn in draws)


def summary(name: str, rows: list[dict[str, Any]], ceiling: float) -> dict[str, Any]:
    """Return how well the predictions of one model hold."""
    column = {key: [row[key] for row in rows] for key in rows[0]}
    low, high, measured = column["low %"], column["high %"], column["measured %"]
    room = [2 * error for error in column["standard error %"]]
    held = [a <= m <= b for a, m, b in zip(low, measured, high, strict=True)]
    near = [a - r <= m <= b + r for a, m, b, r in zip(low, measured, high, room, strict=True)]
    return {
        "model": name,
        "developed on": "yes" if MODELS[name].developed else "no",
        "plans": len(rows),
        "tau": float(kendalltau(column["predicted %"], measured).statistic),
        "tau of a perfect prediction": ceiling,
        "tau where apart": _order_where_apart(column),
        "tau by range": float(kendalltau(column["values lost %"], measured).statistic),
        "in interval": sum(held),
        "within 2 standard errors": sum(near),
        "by consequence %": measured[-1],
        "by range %": measured[-2],
        "best of all %": min(measured),
    }


def _order_where_apart(column: dict[str, list[float]]) -> float:
    """Return Kendall's tau over the pairs whose measured difference exceeds two standard errors."""
    predicted, measured, errors = (column[key] for key in ("predicted %", "measured %", "standard error %"))
    pairs = [
        math.copysign(1, (predicted[i] - predicted[j]) * (measured[i] - measured[j]))
        for i, j in itertools.combinations(range(len(measured)), 2)
        if predicted[i] != predicted[j] and abs(measured[i] - measured[j]) > 2 * math.hypot(errors[i], errors[j])
    ]
    return statistics.fmean(pairs) if pairs else math.nan


def main() -> None:
    """Measure all models and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=8, help="at least so many: more if more were kept")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--mixes", type=int, default=4)
    parser.add_argument("--models", nargs="*", default=[*MODELS], choices=[*MODELS])
    parser.add_argument("--keep", type=Path, help="a folder for trainings, which a second call does not repeat")
    parser.add_argument("--no-write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("Predicted loss of plans", "cpu")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            keep = arguments.keep or Path(folder)
            found = measure(name, arguments.seeds, arguments.steps, arguments.mixes, keep)
            results.add(f"{name}: plans of six bits", found["note"], found["rows"])
            rows.append(summary(name, found["rows"], found["ceiling"]))
    results.add("Plans: order, interval and choice", "Kendall's tau of predicted and measured order.", rows)
    kinds = ["all", *sorted({str(row["developed on"]) for row in rows})]
    results.add("Plans: against the goals", "Means over models.", [_goal(rows, kind) for kind in kinds])
    if not arguments.no_write:
        results.write("plan")


def _goal(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    chosen = [row for row in rows if kind in ("all", row["developed on"])]
    plans = sum(row["plans"] for row in chosen)
    return {
        "models": {"all": "all", "yes": "developed on", "no": "not developed on"}[kind],
        "mean tau": statistics.fmean(row["tau"] for row in chosen),
        "goal tau": GOALS["tau"],
        "mean tau of a perfect prediction": statistics.fmean(row["tau of a perfect prediction"] for row in chosen),
        "mean tau where apart": statistics.fmean(row["tau where apart"] for row in chosen),
        "mean tau by range": statistics.fmean(row["tau by range"] for row in chosen),
        "share in interval": sum(row["in interval"] for row in chosen) / plans,
        "within 2 standard errors": sum(row["within 2 standard errors"] for row in chosen) / plans,
        "goal share": GOALS["held"],
    }


if __name__ == "__main__":
    main()
