"""Experiment `levels` (X5, X7): O0 to O3 on a small network with batch norm.

Loss scales are compared there too. Every training of a seed begins with the same weights and sees the same pictures.
Levels are compared by accuracy on pictures held out, over several seeds; the loss scales by what FP16 loses of the
gradients of activations, and by what comes of it.

What FP16 needs to lose gradients is stated, not hidden: the training is one device's share of a step over 2,048 of
them, so that the loss is divided by that number (and SGD's learning rate multiplied, which changes nothing in FP32).
With a loss that is not divided this network trains in FP16 at any scale.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.diagnosis import View, diagnose
from plimsoll.emulate import CUDA, OperationLists
from plimsoll.emulate.operation_counts import name_of
from plimsoll.precision import Loop, Policy, prepare
from plimsoll.runs import Run
from plimsoll.scaling import StaticScaler
from plimsoll.text import percent
from plimsoll.watch import Watch, watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.clip.model import SHAPES, VOCABULARY, make_batch
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.statistics import columns, largest, lost
from plimsoll_lab.study import Experiment, check_steps, settings_of

_PAIRS = [(one, other) for one in range(len(SHAPES)) for other in range(one, len(SHAPES))]
CLASSES = len(_PAIRS)
_FIRST_SHAPE = VOCABULARY.index(SHAPES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures (n, 3, 32, 32), values about zero, and the class of each."""

    pixels: Tensor
    classes: Tensor


def make_pictures(seed: int, step: int, size: int, device: str = "cpu") -> Pictures:
    """The batch of that step; it follows from the seed and the step alone."""
    batch = make_batch(seed, step, size)
    return Pictures(
        pixels=(batch.pictures * 2.0 - 0.5).to(device), classes=classes_of(batch.captions).to(device)
    )  # fmt: skip


def classes_of(captions: Tensor) -> Tensor:
    """The class of each caption's picture: the number of its pair of shapes."""
    shapes = captions - _FIRST_SHAPE
    named = (shapes >= 0) & (shapes < len(SHAPES))
    both = shapes[named].view(len(captions), 2).sort(dim=1).values
    numbers = torch.full((len(SHAPES), len(SHAPES)), -1)
    for number, (one, other) in enumerate(_PAIRS):
        numbers[one, other] = number
    return numbers[both[:, 0], both[:, 1]]


class SmallNet(nn.Module):
    """Three convolutions with batch norm, ReLU and pooling; a mean; a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in widths[1:])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The score of each class, (n, 10)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.max_pool2d(torch.relu(norm(convolution(x))), 2)
        return self.head(x.mean(dim=(2, 3)))


def loss_of(scores: Tensor, classes: Tensor) -> Tensor:
    """Return the FP32 mean cross-entropy (N6): FP16 would round the logarithms."""
    return nn.functional.cross_entropy(scores.float(), classes)


Dtypes = Mapping[str, frozenset[torch.dtype]]
_MOVING = frozenset(("_to_copy", "detach", "expand", "permute", "t", "transpose", "view"))  # none computes anything


class _ResultDtypes(TorchDispatchMode):
    """Mode that notes each operation's dtype: its first floating tensor's."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        floating = [x.dtype for x in _tensors(args) if x.is_floating_point()]
        if floating and name_of(func) not in _MOVING:
            self.dtypes.setdefault(name_of(func), set()).add(floating[0])
        return func(*args, **(kwargs or {}))


def operations_at(level: str, policy: Policy | None = None) -> Dtypes:
    """Return each operation of the network's forward and loss, with its dtypes."""
    model = SmallNet(8).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pixels = torch.empty(4, 3, 32, 32, device="meta")
    classes = torch.zeros(4, dtype=torch.long, device="meta")
    with prepare(model, optimizer, level, policy=policy) as loop, _ResultDtypes() as results, loop.forward():
        loss_of(model(pixels), classes)
    return {name: frozenset(dtypes) for name, dtypes in sorted(results.dtypes.items())}


def in_words(dtypes: Dtypes) -> str:
    """The operations by dtype, in words."""
    by_dtype: dict[str, list[str]] = {}
    for name, found in dtypes.items():
        for dtype in found:
            by_dtype.setdefault(str(dtype).removeprefix("torch."), []).append(name)
    return "; ".join(f"{dtype}: {', '.join(names)}" for dtype, names in sorted(by_dtype.items()))


def _tensors(args: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for each in args:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(cast("list[Any]", each))
    return found


FEWEST_STEPS = 20
_HELD_OUT_AT = 1_000_000  # a step that no training comes to: its pictures are held out
_CHUNK = 256  # pictures of an evaluation at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `devices`: the training is one device's share of a step over so many: its loss is divided by their number, and the
      learning rate multiplied, so that in FP32 nothing changes. Gradients are as small as they are in large batches.
    - `learning_rate`: of SGD with momentum, at its highest. `seeds`: trainings of each level; of a loss scale, or of
      other lists, there is one. `held_out`: pictures that accuracy is measured on.
    - `every`: how often the watched trainings are recorded.
    """

    steps: int = 160
    warmup: int = 20
    batch: int = 32
    width: int = 8
    devices: int = 2048
    learning_rate: float = 0.1
    seeds: int = 5
    held_out: int = 512
    every: int = 20


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=1000, warmup=100, batch=64, width=32, devices=1024, seeds=5, held_out=8192) if full else Setup()
    if steps is None:
        return whole
    check_steps("levels", steps, FEWEST_STEPS, whole.steps, ", so that there is something to learn")
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: constant `scale`, None for the level's; `policy` for lists.

    `watched`: the first seed's training leaves the spectra of its tensors, and not its losses alone.
    """

    name: str
    title: str
    level: str
    scale: float | None = None
    policy: Policy | None = None
    watched: bool = False


# X5: another accelerator, whose convolutions are to run in FP32 and whose ReLU is to be asked for in FP32 too.
CHANGED = Policy(operations=CUDA.with_high("conv2d", "relu"))
OF_LEVELS = (
    Kind(name="fp32", title="O0: FP32", level="fp32", watched=True),
    Kind(name="amp-fp16", title="O1: amp-fp16, dynamic scale", level="amp-fp16", watched=True),
    Kind(name="amp-bf16", title="O1 in BF16: amp-bf16", level="amp-bf16"),
    Kind(name="fp16-master", title="O2: fp16-master, dynamic scale", level="fp16-master", watched=True),
    Kind(name="fp16-pure", title="O3: fp16-pure, dynamic scale", level="fp16-pure", watched=True),
    Kind(name="bf16-master", title="bf16-master", level="bf16-master"),
    Kind(name="bf16-stochastic", title="bf16-stochastic", level="bf16-stochastic"),
    Kind(name="bf16-kahan", title="bf16-kahan", level="bf16-kahan"),
)
LISTS = Kind(name="changed-lists", title="O1, lists changed", level="amp-fp16", policy=CHANGED, watched=True)
SCALES = tuple(
    Kind(
        name=f"scale-{scale}", title="O1, no loss scale" if scale == 1 else f"O1, loss scale {scale:,}",
        level="amp-fp16", scale=float(scale), watched=True,
    )
    for scale in (1, 8, 128, 1024, 2**15)
)  # fmt: skip
KINDS = (*OF_LEVELS, LISTS, *SCALES)
_BY_NAME = {kind.name: kind for kind in KINDS}


def trained(task: Task) -> None:
    """Train as a task of `to_task` says, from its seed's weights and pictures."""
    kind, setup, device = _BY_NAME[task["kind"]], Setup(**task["setup"]), task["device"]
    torch.manual_seed(task["seed"])
    model = SmallNet(setup.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate * setup.devices, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = None if kind.scale is None else StaticScaler(kind.scale, device=device)
    with (
        _record(kind, task, setup, model, optimizer) as record,
        prepare(
            model, optimizer, kind.level, scaler=scaler, schedulers=[schedule], policy=kind.policy,
            watch=record if isinstance(record, Watch) else None,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            batch = make_pictures(task["seed"], step, setup.batch, device)
            with loop.forward():
                loss = loss_of(model(batch.pixels), batch.classes)
            record.log(train_loss=loss.detach())
            loop.step(loss / setup.devices)
        record.log(accuracy=_accuracy(loop, task["seed"], setup, device))


def _accuracy(loop: Loop, seed: int, setup: Setup, device: str) -> Tensor:
    """Return the accuracy on held-out pictures, in the level's own arithmetic."""
    pictures = make_pictures(seed, _HELD_OUT_AT, setup.held_out, device)
    right = torch.zeros((), device=device)
    with loop.evaluate() as model:
        for start in range(0, setup.held_out, _CHUNK):
            part = slice(start, start + _CHUNK)
            right += (model(pictures.pixels[part]).argmax(dim=1) == pictures.classes[part]).sum()
    return right / setup.held_out


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    return min((step + 1) / setup.warmup, (setup.steps - step) / (setup.steps - setup.warmup))


def _record(
    kind: Kind, task: Task, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Watch | Unwatched:
    run = Path(task["run"])
    if not task["watched"]:
        return Unwatched(run)
    shadow = setup.every if kind.level == "amp-fp16" else None  # tells values that FP16 has lost from true zeros
    return watch(model, optimizer, run=run, every=setup.every, shadow_every=shadow)


def to_task(kind: Kind, seed: int, run: Path, setup: Setup, device: str, *, watched: bool) -> Task:
    """A training as JSON-able data."""
    return {
        "name": run.name, "kind": kind.name, "seed": seed, "run": str(run), "watched": watched,
        "setup": asdict(setup), "device": device,
    }  # fmt: skip


_CONFIDENCE = 0.95
_FAILS = 0.05  # of the pictures, by which a training that fails is behind


def accuracies(runs: Sequence[Path]) -> tuple[float, ...]:
    """The accuracy that each training ended with."""
    return tuple(float(Run(run).scalars("accuracy")[1][-1]) for run in runs)


def behind(these: Sequence[float], those: Sequence[float]) -> float:
    """Return how much the first are behind the second at most, with 95 %, or NaN.

    NaN of a single pair, which shows no spread.

    >>> round(behind([0.90, 0.91, 0.92], [0.91, 0.92, 0.93]), 6)
    0.01
    """
    differences = np.subtract(those, these)
    if len(differences) < 2:
        return math.nan
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) + float(stats.t.ppf(_CONFIDENCE, len(differences) - 1)) * error


def judged(kind: Kind, run: Path, fp32: float) -> Training:
    """Judge a watched training; `fp32`: the accuracy of that seed in FP32."""
    view = View(Run(run))
    findings = tuple(diagnose(view))
    (accuracy,) = accuracies([run])
    numbers = {"accuracy": accuracy, "behind_fp32": fp32 - accuracy, **lost(view), **_scale(view), **formats(view.run)}
    steps, loss = view.run.scalars("train_loss")
    good = accuracy > fp32 - _FAILS
    return Training(
        name=kind.name, title=kind.title, run=run, numbers=numbers, good=good, findings=findings,
        outcome="trains" if good else "falls behind", series=columns(steps, loss), series_of="loss",
    )  # fmt: skip


def formats(run: Run) -> dict[str, float]:
    """Return the numbers of tensors that the run recorded in 16 bits, and in FP32.

    They are outputs of convolutions, weights and norms' parameters.
    """
    step = run.steps[-1]
    found: dict[str, float] = {}
    for name in run.tensors["activations"]:
        if name.startswith("convolutions") and name.endswith("output"):
            _count(found, f"convolutions_{_format(run, 'activations', name, step)}")
    for name in run.tensors["weights"]:
        what = "norms" if name.startswith("norms") else "weights"
        _count(found, f"{what}_{_format(run, 'weights', name, step)}")
    return found


def _format(run: Run, collection: str, name: str, step: int) -> str:
    source = run.spectrum(collection, name, step).source
    return "unknown" if source is None else source.format


def _count(found: dict[str, float], key: str) -> None:
    found[key] = found.get(key, 0.0) + 1.0


def _scale(view: View) -> Mapping[str, float]:
    """The loss scale as exponents, first and last."""
    _, scale = view.scalar("scale")
    return {"scale_begin": math.log2(scale[0]), "scale_end": math.log2(scale[-1])} if len(scale) else {}


_EQUAL = 0.02  # of the pictures held out: two points
_TRAILS = 0.05
_MANY, _FEW = 0.5, 0.05  # of gradients lost
_EQUALS = ("amp-fp16", "amp-bf16", "fp16-master", "bf16-master", "bf16-stochastic", "bf16-kahan")
_TRAINED = "plimsoll_lab.experiments.levels:trained"
Accuracies = Mapping[str, Sequence[float]]
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    runs = {kind.name: runs_of(kind, bench, setup) for kind in KINDS}
    tasks = [
        to_task(kind, bench.seed + number, run, setup, bench.device, watched=kind.watched and number == 0)
        for kind in KINDS
        for number, run in enumerate(runs[kind.name])
    ]
    with one_thread(unless=bench.full):
        carry_out(_TRAINED, tasks, workers=workers, progress=bench.progress)
    found = {name: accuracies(paths) for name, paths in runs.items()}
    watched = [kind for kind in KINDS if kind.watched]
    trainings = tuple(judged(kind, runs[kind.name][0], found["fp32"][0]) for kind in watched)
    numbers = {training.name: training.numbers for training in trainings}
    ran = {"O1": operations_at("amp-fp16"), "changed": operations_at("amp-fp16", CHANGED)}
    return Measured(trainings=trainings, claims=claims(found, numbers, ran), said=_said(found, numbers, ran))


def runs_of(kind: Kind, bench: Bench, setup: Setup) -> list[Path]:
    """Return each training's folder of a kind: `bench.seed`'s first, maybe watched."""
    seeds = setup.seeds if kind in OF_LEVELS else 1
    return [bench.runs / (kind.name if number == 0 else f"{kind.name}-seed-{number}") for number in range(seeds)]


def claims(found: Accuracies, numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    They speak of accuracies by kind, numbers of the watched trainings, and operations that ran.
    """
    return (
        *of_rows(_of_levels(found), "X5", "X7"),
        *of_rows(_of_formats(numbers, ran), "X5"),
        *of_rows(_of_scales(numbers), "X7"),
    )


def _of_levels(found: Accuracies) -> tuple[Claim, ...]:
    titles = {kind.name: kind.title for kind in OF_LEVELS}
    return tuple(
        Claim(f"{name}-as-fp32", f"{titles[name]}: as accurate as FP32",
              behind(found[name], found["fp32"]), at_most=_EQUAL, unit="of the pictures behind, at most")
        for name in _EQUALS
    )  # fmt: skip


def _of_formats(numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[Claim, ...]:
    first, second, changed = numbers["amp-fp16"], numbers["fp16-master"], numbers["changed-lists"]
    return claims_of(
        f"""
        o1-by-the-lists | o1_by_the_lists | at most 0 operations in another
            | O1: every operation runs in the dtype that its list says
        o1-convolutions | o1_convolutions | at least 3 layers
            | O1: the outputs of all convolutions are recorded in FP16, weights in FP32
        o2-norms | o2_norms | at least 0 and at most 0 of its 6 parameters otherwise | O2: batch norm stays in FP32
        o2-weights | o2_weights | at least 0 and at most 0 of 5 otherwise | O2: all other weights are in FP16
        lists-changed | lists_changed | at least 3 layers
            | lists changed by the user: convolutions are recorded in FP32
        lists-obeyed | lists_obeyed | at most 0 operations in another
            | lists changed by the user: every operation runs in the dtype that they say
        lists-train | changed.behind_fp32 | at most {_TRAILS} of the pictures behind FP32
            | lists changed by the user: it trains
        """,
        changed=changed,
        o1_by_the_lists=astray(ran["O1"], Policy().operations),
        o1_convolutions=min(first.get("convolutions_fp16", 0.0), first.get("weights_fp32", 0.0)),
        o2_norms=second.get("norms_fp32", 0.0) - 6,
        o2_weights=5 - second.get("weights_fp16", 0.0),
        lists_changed=changed.get("convolutions_fp32", 0.0),
        lists_obeyed=astray(ran["changed"], CHANGED.operations),
    )


def _of_scales(numbers: Numbers) -> tuple[Claim, ...]:
    dynamic = numbers["amp-fp16"]
    by_scale = [numbers[kind.name]["lost_after"] for kind in SCALES]
    last = SCALES[-1].name
    return claims_of(
        f"""
        no-scale-loses | by_scale[0] | at least {_MANY} of gradients
            | no loss scale: FP16 loses most gradients of activations
        no-scale-trails | dynamic.accuracy - numbers['scale-1'].accuracy | at least {_TRAILS} of the pictures
            | no loss scale: the same training falls behind the dynamic scale's
        each-scale-saves | each_scale_saves | at most 0 of gradients more than the scale below, at most
            | each higher scale, from none to 2^15, loses fewer
        high-scale-saves | high_scale_saves | at most {_FEW} of gradients | a scale of 2^15 loses few
        dynamic-saves | dynamic.lost_after | at most {_FEW} of gradients
            | the dynamic scale finds its place: it loses few
        static-as-dynamic | static_as_dynamic | at most {_TRAILS} of the pictures behind it
            | a scale of 2^15 works as well as the dynamic one
        """,
        by_scale=by_scale,
        dynamic=dynamic,
        numbers=numbers,
        each_scale_saves=largest(after - before for before, after in itertools.pairwise(by_scale)),
        high_scale_saves=by_scale[-1],
        static_as_dynamic=dynamic["accuracy"] - numbers[last]["accuracy"],
    )


# What an operation that reaches a kernel is called on the lists, where a composite one is listed.
_LISTED = {
    "addmm": "linear", "_log_softmax": "log_softmax", "nll_loss_forward": "nll_loss", "convolution": "conv2d",
}  # fmt: skip


def astray(ran: Dtypes, lists: OperationLists) -> float:
    """Return the number of operations that ran in another dtype than their list's.

    One that is on none may run in any.
    """
    expected = {"low": frozenset({torch.float16}), "high": frozenset({torch.float32})}
    places = {name: lists.of(_LISTED.get(name, name)) for name in ran}
    return float(sum(place in expected and ran[name] != expected[place] for name, place in places.items()))


def _said(found: Accuracies, numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[str, ...]:
    means = {name: sum(values) / len(values) for name, values in found.items()}
    levels = ", ".join(f"{name} {percent(means[name], 1)}" for name in (kind.name for kind in OF_LEVELS))
    pure = behind(found["fp16-pure"], found["fp32"])
    o3 = (
        f"O3 (fp16-pure) is behind FP32 by {percent(means['fp32'] - means['fp16-pure'], 1)} of the pictures in the "
        "mean, and "
        f"by {percent(pure, 1)} at most (95 %)."
    )
    scales = "; ".join(
        f"{kind.title.removeprefix('O1, ')}: {percent(numbers[kind.name]['lost_after'], 1)} lost, "
        f"{percent(numbers[kind.name]['accuracy'], 1)} right"
        for kind in SCALES
    )
    dynamic = numbers["amp-fp16"]
    scales = (
        f"Of the same training's gradients of activations, and pictures, {scales}; dynamic: "
        f"{percent(dynamic['lost_after'], 1)} lost, {percent(dynamic['accuracy'], 1)} right."
    )
    return (
        f"Of the pictures held out are classified right: {levels}.",
        o3,
        scales,
        f"At O1 there ran in {in_words(ran['O1'])}.",
        f"With conv2d and relu moved to the list high there ran in {in_words(ran['changed'])}.",
    )


def _settings(bench: Bench) -> Mapping[str, object]:
    return settings_of(setup_for(bench.steps, full=bench.full), bench.device)


LEVELS = Experiment(
    name="levels",
    claim="O1 and O2 are as accurate as FP32 on a network with batch norm, if the loss is scaled; lists are a user's.",
    source="X5, X7",
    settings=_settings,
    measure=measure,
)
