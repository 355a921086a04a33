"""How often `plimsoll.parity` errs: on simulated losses, and on small trainings that are repeated.

    python benchmarks/parity.py                     100 simulated comparisons of each kind, 75 trainings; half an hour
    python benchmarks/parity.py --quick             a smoke run

Each comparison is read at 60 steps and stopped at the first verdict, which is the most that looking again and again can
spoil. The hardest truth is planted: a candidate that is worse by exactly the tolerance, so that "equivalent" and
"worse" both are errors. The goal: at most 5 % of each. Below it, the same with no difference at all.

The trainings are of one recipe: BF16 weights with stochastic rounding. Repeats on the same data differ in the random
bits of the rounding; others in initialization and data too. So any difference between them is chance.
"""

import argparse
import itertools
import pydoc_data.topics
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _harness import Results
from numpy.typing import NDArray
from scipy.signal import lfilter
from scipy.stats import beta
from torch import nn

import plimsoll as pl

Floats = NDArray[np.float64]
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "parity-calibration.svg"
TOLERANCES = (0.002, 0.01, 0.05)  # of the level of real trainings
GOAL = 0.05
FIRST_SEED = 1000  # of the trainings: those from 0 on chose the margin for one run each, and do not judge it


def first_verdict(base: Sequence[Floats], candidate: Sequence[Floats], tolerance: float, **options: float) -> str:
    """The first verdict of the readings that is one, or "undecided"."""
    found = pl.parity(list(base), list(candidate), tolerance=tolerance, **options)
    verdicts = [moment.verdict for moment in found.history] or [found.verdict]
    return next((verdict for verdict in verdicts if verdict != "undecided"), "undecided")


def share(errors: int, of: int) -> str:
    """A share, with the upper end of its 95 % interval (Clopper and Pearson)."""
    upper = 1.0 if errors == of else float(beta.ppf(0.975, errors + 1, of - errors))
    return f"{errors / of:.1%} (at most {upper:.1%})"


def row(kind: str, verdicts: Callable[[float], Iterator[str]], tolerance: float) -> dict[str, object]:
    """Errors of one kind of comparison, with the tolerance planted and with nothing planted."""
    planted, nothing = [*verdicts(tolerance)], [*verdicts(0.0)]
    wrong = sum(verdict in ("worse", "better") for verdict in nothing)
    return {
        "comparison": kind,
        "of": len(planted),
        "false equivalent": share(planted.count("equivalent"), len(planted)),
        "false worse": share(planted.count("worse"), len(planted)),
        "false worse or better, no difference": share(wrong, len(nothing)),
        "equivalent found": f"{nothing.count('equivalent') / len(nothing):.0%}",
    }


# -- simulated losses

STEPS = 2000
TOLERANCE = 0.02
SHARED, OWN = 0.1, 0.03  # noise of a batch, which both runs have, and noise that each has alone
BETWEEN = 0.006  # standard deviation between runs, where there are repeats


def white(rng: np.random.Generator) -> Floats:
    """Independent normal noise."""
    return rng.normal(0, OWN, STEPS)


def correlated(rng: np.random.Generator) -> Floats:
    """Normal noise whose autocorrelation is 0.9 a step."""
    return lfilter([1], [1, -0.9], rng.normal(0, OWN, STEPS + 500))[500:] * np.sqrt(1 - 0.81)


def heavy(rng: np.random.Generator) -> Floats:
    """Noise of which a few values are far out."""
    return OWN * rng.standard_t(2.5, STEPS)


def spikes(rng: np.random.Generator) -> Floats:
    """Noise with rare spikes of the loss."""
    return white(rng) + (rng.random(STEPS) < 0.003) * rng.exponential(2.0, STEPS)


def shrinking(rng: np.random.Generator) -> Floats:
    """Noise that shrinks as the run goes on."""
    return white(rng) * 5 / np.sqrt(1 + np.arange(STEPS) / 20)


def gaps(rng: np.random.Generator) -> Floats:
    """Noise with values missing at random."""
    return np.where(rng.random(STEPS) < 0.1, np.nan, white(rng))


NOISES = {
    "independent noise": white,
    "noise with a memory of 10 steps": correlated,
    "heavy tails (Student, 2.5 degrees of freedom)": heavy,
    "spikes": spikes,
    "noise that shrinks": shrinking,
    "a tenth of the steps missing": gaps,
}


def simulated(noise: Callable[..., Floats], runs: tuple[int, int], seed: int) -> tuple[list[Floats], list[Floats]]:
    """Loss curves of both sides, of one recipe. Runs of one number share their batches."""
    rng = np.random.default_rng(seed)
    curve = 2 + 1.5 * np.exp(-np.arange(STEPS) / 250)
    batches = [curve + rng.normal(0, SHARED, STEPS) for _ in range(max(runs))]
    between = 0.0 if max(runs) == 1 else BETWEEN
    return tuple([batches[k] + noise(rng) + rng.normal(0, between) for k in range(many)] for many in runs)


def simulations(repeats: int) -> Iterator[dict[str, object]]:
    """One row for each kind of noise and number of runs."""

    def of(noise: Callable[..., Floats], runs: tuple[int, int]) -> Callable[[float], Iterator[str]]:
        def verdicts(planted: float) -> Iterator[str]:
            for seed in range(repeats):
                base, candidate = simulated(noise, runs, seed)
                yield first_verdict(base, [values + planted for values in candidate], TOLERANCE)

        return verdicts

    for name, noise in NOISES.items():
        yield row(f"one run each, {name}", of(noise, (1, 1)), TOLERANCE)
    for runs in ((2, 2), (3, 3), (5, 5), (5, 1), (5, 3)):
        yield row(f"{runs[0]} runs and {runs[1]}", of(white, runs), TOLERANCE)

    def added(planted: float) -> Iterator[str]:
        for seed in range(repeats):
            base, candidate = simulated(white, (8, 8), seed)
            tried = (first_verdict(base[:k], [c + planted for c in candidate[:k]], TOLERANCE) for k in range(2, 9))
            yield next((verdict for verdict in tried if verdict != "undecided"), "undecided")

    yield row("2 to 8 runs each, added one by one", added, TOLERANCE)


# -- trainings


class Reader(nn.Module):
    """A GRU that reads text."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters, self.gru, self.head = (
            nn.Embedding(letters, 32),
            nn.GRU(32, 48, batch_first=True),
            nn.Linear(48, letters),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next letters."""
        return self.head(self.gru(self.letters(x))[0])


def text_loss() -> tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], float]:
    """Next letters of Python's manual."""
    pages = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    letters, codes = np.unique(np.frombuffer(pages.encode("ascii", "ignore"), np.uint8), return_inverse=True)
    text = torch.tensor(codes)

    def loss(model: nn.Module, data: np.random.Generator) -> torch.Tensor:
        batch = torch.stack([text[i : i + 13] for i in data.integers(0, len(text) - 13, 16).tolist()])
        return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return lambda: Reader(len(letters)), loss, 4e-3


def picture_loss() -> tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], float]:
    """Which of ten blurred patterns a noisy picture shows."""
    patterns = (
        nn.functional.avg_pool2d(torch.randn(10, 1, 14, 14, generator=torch.Generator().manual_seed(1)), 3, 1) * 3
    )

    def make() -> nn.Module:
        first = [nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(24 * 9, 10))

    def loss(model: nn.Module, data: np.random.Generator) -> torch.Tensor:
        labels = torch.tensor(data.integers(0, 10, 32))
        noise = torch.tensor(data.normal(0, 1.8, (32, 1, 12, 12)), dtype=torch.float32)
        return nn.functional.cross_entropy(model(patterns[labels] + noise), labels)

    return make, loss, 2e-3


def function_loss() -> tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], float]:
    """A product of sines of ten numbers."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))

    def loss(model: nn.Module, data: np.random.Generator) -> torch.Tensor:
        x = torch.tensor(data.normal(size=(64, 10)), dtype=torch.float32)
        target = torch.sin(x[:, :5]).sum(1) * torch.cos(x[:, 5:]).sum(1) / 5
        return nn.functional.mse_loss(
            model(x)[:, 0], target + 0.1 * torch.tensor(data.normal(size=64), dtype=torch.float32)
        )

    return make, loss, 3e-3


TASKS = {"text, GRU": text_loss, "pictures, convolutions": picture_loss, "function, MLP": function_loss}


def train(task: str, seed: int, rounding: int, steps: int, rate: float = 1.0) -> Floats:
    """The losses of one training: `seed` for initialization and data, `rounding` for the bits of the rounding."""
    make, loss_of, learning_rate = TASKS[task]()
    torch.manual_seed(seed)
    model, data = make(), np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate * rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.9 * step / steps)
    bits = torch.Generator().manual_seed(1_000_003 * seed + rounding)
    losses = np.empty(steps)
    for step in range(steps):
        loss = loss_of(model, data)
        losses[step] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(pl.cast(parameter, "bf16", rounding="stochastic", generator=bits))
    return losses


def trainings(seeds: int, repeats: int, steps: int, kept: Path | None) -> dict[str, Floats]:
    """Losses by task: seed, repeat, step; the last repeat has half the learning rate."""
    found: dict[str, Floats] = {}
    for task in TASKS:
        file = None if kept is None else kept / f"{task.split(',')[0]}.npy"
        if file is not None and file.exists():
            found[task] = np.load(file)
            continue
        fresh = range(FIRST_SEED, FIRST_SEED + seeds)
        runs = [[train(task, seed, r, steps) for r in range(repeats)] for seed in fresh]
        halved = [train(task, seed, repeats, steps, 0.5) for seed in fresh]
        found[task] = np.array([[*each, half] for each, half in zip(runs, halved, strict=True)])
        if file is not None:
            np.save(file, found[task])
        print(f"trained: {task}, {found[task].shape[0] * found[task].shape[1]} runs", flush=True)
    return found


Pairs = list[tuple[list[Floats], list[Floats]]]


def comparisons(runs: Floats) -> dict[str, Pairs]:
    """Comparisons of one task's runs, of which all have the same recipe."""
    seeds, repeats = runs.shape[:2]
    ways = [*itertools.permutations(range(repeats), 2)]
    others = [(i, j) for i, j in itertools.permutations(range(seeds), 2)]
    few = [*itertools.combinations(range(seeds), min(3, seeds))]
    return {
        "one run each, same data": [([runs[s, a]], [runs[s, b]]) for s in range(seeds) for a, b in ways],
        "one run each, other data": [([runs[i, a]], [runs[j, b]]) for i, j in others for a, b in ways[:3]],
        "2 runs each, paired": [
            ([runs[i, a], runs[j, a]], [runs[i, b], runs[j, b]])
            for i, j in itertools.combinations(range(seeds), 2) for a, b in ways[:4]
        ],
        "3 runs each, paired": [([runs[i, a] for i in s], [runs[i, b] for i in s]) for s in few for a, b in ways[:4]],
        f"{repeats - 1} runs and 1, same data": [
            ([runs[s, b] for b in range(repeats) if b != a], [runs[s, a]]) for s in range(seeds) for a in range(repeats)
        ],
    }  # fmt: skip


def real(found: dict[str, Floats]) -> Iterator[dict[str, object]]:
    """One row for each kind of comparison, over all tasks and tolerances."""
    by_kind: dict[str, list[tuple[list[Floats], list[Floats]]]] = {}
    for runs in found.values():
        for kind, pairs in comparisons(runs[:, :-1]).items():
            by_kind.setdefault(kind, []).extend(pairs)
    for kind, pairs in by_kind.items():

        def verdicts(planted: float, pairs: Pairs = pairs) -> Iterator[str]:
            for (base, candidate), tolerance in itertools.product(pairs, TOLERANCES):
                allowed = tolerance * float(base[0][-len(base[0]) // 10 :].mean())
                yield first_verdict(base, [c + planted * allowed for c in candidate], allowed)

        yield row(kind, verdicts, 1.0)


def power(found: dict[str, Floats]) -> Iterator[dict[str, object]]:
    """What is said of a recipe that is worse: half the learning rate, at a tolerance of 1 %."""
    for task, runs in found.items():
        for many in (1, len(runs)):
            one = [
                pl.parity(runs[s : s + many, 0], runs[s : s + many, -1], tolerance="1%")
                for s in range(0, len(runs), many)
            ]
            needed = [float(p.speed.steps) for p in one if p.speed.steps is not None]
            yield {
                "task": task,
                "runs each": many,
                "difference": f"{np.mean([float(p.difference) / p.level for p in one]):+.1%}",
                "verdicts": ", ".join(
                    f"{sum(p.verdict == v for p in one)} {v}" for v in sorted({p.verdict for p in one})
                ),
                "steps for the same loss": statistics.mean(needed) if needed else None,
            }


# -- the picture


def draw(tables: Sequence[tuple[str, list[dict[str, object]]]]) -> None:
    """Draws the shares of errors as points with the upper ends of their intervals."""
    width, left, right, line = 760, 330, 24, 22
    grey, blue, orange = "#808080", "#3b7dd8", "#e08a1e"
    most = 0.1

    def x(value: float) -> float:
        return left + (width - left - right) * min(value, most) / most

    def label(at: float, height: float, words: str, *, anchor: str = "start", weight: int = 400) -> str:
        where = f'x="{at:.1f}" y="{height}" text-anchor="{anchor}" font-weight="{weight}"'
        return f'<text {where} fill="{grey}" font-size="12">{words}</text>'

    parts, y = [], 46
    for title, rows in tables:
        parts.append(label(12, y, title, weight=600))
        for entry in rows:
            y += line
            parts.append(label(12, y, str(entry["comparison"]).partition(" (")[0]))
            for column, colour, shift in (("false equivalent", blue, -8), ("false worse", orange, 0)):
                rate, upper = (float(word.rstrip("%)")) / 100 for word in str(entry[column]).split(" (at most "))
                at = y + shift
                parts.append(f'<path d="M{x(rate):.1f} {at}H{x(upper):.1f}" stroke="{colour}" stroke-width="2"/>')
                parts.append(f'<circle cx="{x(rate):.1f}" cy="{at}" r="3.5" fill="{colour}"/>')
        y += 34
    axis = [label(x(v), y, f"{100 * v:g} %", anchor="middle") for v in (0.0, 0.025, 0.05, 0.075, 0.1)]
    goal = f'<path d="M{x(GOAL):.1f} 30V{y - 16}" stroke="{grey}" stroke-dasharray="4 3"/>'
    legend = [
        f'<circle cx="{at}" cy="15" r="3.5" fill="{colour}"/>{label(at + 9, 19, words)}'
        for at, colour, words in ((left, blue, "false equivalent"), (left + 140, orange, "false worse"))
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 12}" role="img" fill="none" '
        'font-family="ui-sans-serif, sans-serif"><title>Errors of the parity verdict</title>'
    )
    PICTURE.write_text("\n".join([head, goal, *legend, *parts, *axis, "</svg>"]) + "\n")


def main() -> None:
    """Measures and writes the tables and the picture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder in which trainings are kept for the next time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    repeats, seeds, rounds, steps = (4, 2, 2, 80) if arguments.quick else (100, 5, 4, 800)
    results = Results("Parity verdict", "cpu")
    errors = "Of each kind, read at 60 steps and stopped at the first verdict. Goal: at most 5 % of each error."
    first = [*simulations(repeats)]
    results.add("Simulated losses", f"{STEPS:,} steps. {errors}", first)
    found = trainings(seeds, rounds, steps, arguments.keep)
    second = [*real(found)]
    many = seeds * rounds * len(TASKS)
    note = f"{many} trainings of one recipe, {steps:,} steps each, tolerances of 0.2 % to 5 % of the loss. {errors} "
    note += "Comparisons share trainings, so that the upper ends are those of more evidence than there is."
    results.add("Small trainings", note, second)
    note = f"{seeds * len(TASKS)} more trainings, with half the learning rate; a tolerance of 1 %."
    results.add("A recipe that is worse", note, [*power(found)])
    if not arguments.quick:
        draw([("Simulated", first), ("Trainings", second)])
        results.write("parity")


if __name__ == "__main__":
    main()
