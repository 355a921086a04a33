"""What modules lose within a forward, by the numbers of inputs and outputs, and sound modules that come near."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Run
from tests.support.cases import each

RULES = ["underflow-high", "kept-narrow", "cast-saturates", "cast-flushes", "structural-zeros"]
SAMPLES = 6


class Apply(nn.Module):
    """A function as a module, so that what comes in and goes out is recorded."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    """The module that is judged, and a layer that learns from what it puts out."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last = inner, nn.LazyLinear(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x).float()).mean()


def found(
    folder: Path,
    inner: nn.Module | Callable[[Tensor], Tensor],
    batch: Callable[[int], Tensor],
    rules: Sequence[str] = RULES,
) -> list[Finding]:
    """The warnings and alarms of a training with this module."""
    path = Path(tempfile.mkdtemp(dir=folder)) / "run"
    model = Net(inner if isinstance(inner, nn.Module) else Apply(inner))
    model(batch(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with pl.watch(model, optimizer, run=path, every=1):
        for step in range(SAMPLES):
            optimizer.zero_grad()
            model(batch(step)).backward()
            optimizer.step()
    findings = [finding for finding in diagnose(path, rules=rules) if finding.severity != "info"]
    for finding in findings:
        assert finding.where[0].startswith("inner:") and " holds" not in verdict(View(Run(path)), findings)
    return findings


def normal(size: float = 1.0, rows: int = 64, width: int = 32) -> Callable[[int], Tensor]:
    return lambda step: size * torch.randn(rows, width)


def spread(most: float, dtype: torch.dtype = torch.float32) -> Callable[[int], Tensor]:
    """Whole numbers up to a largest one, evenly spread."""
    return lambda step: torch.randint(1, int(most) + 1, (64, 32)).to(dtype)


# -- underflow within a module


def length(x: Tensor) -> Tensor:
    return x.half().square().sum(dim=-1, keepdim=True).sqrt().float()


def squares(x: Tensor) -> Tensor:
    return x.half().square().float()


@each(
    "function, size",
    [
        (length, 2.0**-14),
        (length, 1.1 * 2.0**-14),
        (squares, 2.0**-13),
        (lambda x: x.to(torch.float8_e5m2).float(), 2.0**-17),
    ],
)
def test_values_that_underflow_within_a_module_are_named(
    tmp_path: Path, function: Callable[[Tensor], Tensor], size: float
) -> None:
    (finding,) = found(tmp_path, function, normal(size))
    assert (finding.rule, finding.severity) == ("underflow-high", "alarm")
    assert "underflow" in finding.meaning and finding.evidence["worst_lost"] > 0.25  # type: ignore[operator]


@each(
    "function, size",
    [
        (length, 1.0),
        (squares, 1.0),
        (lambda x: x.square().sum(dim=-1, keepdim=True).sqrt(), 2.0**-15),  # FP32 has the squares
        (torch.relu, 2.0**-20),
        (lambda x: torch.where(x > 2.0**-15, 2.0**-12, 0.0 * x).half().float() * (1 + x), 2.0**-15),
        (lambda x: (12 * x).softmax(dim=-1).half().float(), 1.0),  # small ones are zero beside those that are not
    ],
)
def test_small_or_sparse_outputs_are_no_underflow(
    tmp_path: Path, function: Callable[[Tensor], Tensor], size: float
) -> None:
    assert found(tmp_path, function, normal(size)) == []


# -- squares that overflow within a norm


class Norm(nn.Module):
    """A root mean square norm by hand, computed in the dtype of what comes in, or in FP32."""

    def __init__(self, *, wide: bool = False) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(32)), wide

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.wide else x
        return y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + 1e-5) * self.weight


def outliers(rows: int, size: float = 1000.0) -> Callable[[int], Tensor]:
    """A batch of FP16 in which some rows are far larger than the others."""
    return lambda step: (torch.randn(64, 32) * torch.where(torch.arange(64)[:, None] < rows, size, 1.0)).half()


@each("rows, severity", [(64, "alarm"), (20, "alarm"), (4, "warning")])
def test_squares_that_overflow_within_a_norm_are_named(rows: int, severity: str, tmp_path: Path) -> None:
    (finding,) = found(tmp_path, Norm(), outliers(rows), ["dead-layer"])
    assert (finding.severity, finding.evidence["cause"]) == (severity, "squares beyond FP16 within a norm")
    assert finding.evidence["zeros"] == rows / 64


class Masked(Norm):
    """Rows that a mask hides are zero, whatever comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.arange(64)[:, None] < 20, 0.0, x * self.weight)


@each(
    "inner, size",
    [
        (Norm(wide=True), 1000.0),
        (Norm(), 10.0),
        (Masked(), 2.0),
        (Apply(torch.relu), 1000.0),
        (nn.Dropout(0.5), 1000.0),
        (nn.RMSNorm(32).half(), 1000.0),
    ],
)
def test_large_inputs_that_no_norm_loses_are_sound(inner: nn.Module, size: float, tmp_path: Path) -> None:
    assert found(tmp_path, inner, outliers(20, size), ["dead-layer"]) == []


# -- sums and whole numbers in 16 bits


def one_by_one(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        total = torch.zeros(len(x), 1, dtype=dtype)
        for part in x.to(dtype).unbind(dim=1):
            total = total + part[:, None]
        return total

    return add


def shares(rows: int, places: int, size: float = 1.0) -> Callable[[int], Tensor]:
    """Positive addends of rows whose sums differ."""
    return lambda step: size * (torch.rand(rows, 1) + torch.rand(rows, places) + 0.1) / 2.2


@each(
    "places, size, dtype",
    [
        (600, 1.0, torch.bfloat16),
        (800, 0.01, torch.bfloat16),
        (900, 0.5, torch.bfloat16),
        (6000, 1.0, torch.float16),
    ],
)
def test_sums_that_stop_at_powers_of_two_are_named(
    tmp_path: Path, places: int, size: float, dtype: torch.dtype
) -> None:
    batch = lambda step: size * (0.55 + 0.4 * torch.rand(32, places))  # noqa: E731
    (finding,) = found(tmp_path, one_by_one(dtype), batch)
    assert (finding.rule, finding.severity, finding.evidence["cause"]) == (
        "kept-narrow",
        "warning",
        "sums stop at powers of two",
    )
    assert "rounded away" in finding.meaning


@each(
    "function, batch",
    [
        (one_by_one(torch.float32), shares(32, 600)),
        (one_by_one(torch.bfloat16), shares(32, 100)),  # few addends
        (lambda x: x.sum(dim=1, keepdim=True).bfloat16(), shares(32, 600)),
        (lambda x: x.sum(dim=1, keepdim=True).bfloat16(), lambda step: torch.ones(32, 512)),  # exact, a power of two
        (lambda x: x.amax(dim=1, keepdim=True).bfloat16(), lambda step: 2.0 ** torch.randint(0, 8, (32, 600))),
    ],
)
def test_sums_that_are_exact_or_short_are_not(
    tmp_path: Path, function: Callable[[Tensor], Tensor], batch: Callable[[int], Tensor]
) -> None:
    assert found(tmp_path, function, batch) == []


@each("most, dtype", [(4096, torch.bfloat16), (1000, torch.bfloat16), (60_000, torch.float16)])
def test_whole_numbers_that_become_the_same_are_named(tmp_path: Path, most: float, dtype: torch.dtype) -> None:
    (finding,) = found(tmp_path, lambda x: x.to(dtype), spread(most))
    assert (finding.rule, finding.evidence["cause"]) == ("kept-narrow", "whole numbers rounded")
    assert "same value" in finding.meaning and finding.where[0] == "inner:output"


@each(
    "most, divided, dtype",
    [
        (200, 1, torch.bfloat16),
        (400, 1, torch.bfloat16),
        (2000, 1, torch.float16),
        (4096, 1, torch.float32),
        (4096, 4096, torch.bfloat16),
    ],
)
def test_whole_numbers_that_the_format_holds_are_not(
    tmp_path: Path, most: float, divided: float, dtype: torch.dtype
) -> None:
    assert found(tmp_path, lambda x: (x / divided).to(dtype), spread(most)) == []


def test_values_that_are_not_whole_are_not(tmp_path: Path) -> None:
    with_whole_top = lambda step: normal(1000.0)(step).clamp(-4096.0, 4096.0).index_fill(0, torch.tensor([0]), 4096.0)  # noqa: E731
    for batch in (normal(1000.0), with_whole_top):
        assert found(tmp_path, lambda x: x.bfloat16(), batch) == []


# -- casts by hand


class Quantised(nn.Module):
    """Whole numbers times a step, from the largest value of all, of each channel, or of the first batch."""

    def __init__(self, largest: int, dim: int | None = None, *, once: bool = False) -> None:
        super().__init__()
        self.largest, self.dim, self.once = largest, dim, once
        self.top: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.top is None or not self.once:
            self.top = x.abs().amax() if self.dim is None else x.abs().amax(dim=self.dim)
        step = self.top / self.largest
        return (x / step).round().clamp(-self.largest, self.largest) * step


def with_outlier(size: float) -> Callable[[int], Tensor]:
    """Eight channels of which one is larger."""
    return lambda step: torch.randn(64, 8) * torch.tensor([size] + 7 * [1.0])


def quiet_first(size: float) -> Callable[[int], Tensor]:
    return lambda step: torch.randn(64, 8) * (size if step == 0 else 1.0)


@each("largest, size", [(127, 500.0), (127, 2000.0), (7, 40.0), (255, 3000.0)])
def test_a_grid_that_is_too_coarse_for_most_values_is_named(tmp_path: Path, largest: int, size: float) -> None:
    (finding,) = found(tmp_path, Quantised(largest), with_outlier(size))
    assert (finding.rule, finding.severity) == ("cast-flushes", "warning")
    assert finding.evidence["flushed"] > 0.75  # type: ignore[operator]


def in_blocks(dim: int) -> Callable[[Tensor], Tensor]:
    """E2M1 with a power of two for each block of 32 values along a dimension, as in MXFP4."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

    def rounded(x: Tensor) -> Tensor:
        blocks = x.unflatten(dim, (-1, 32))
        scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(dim=dim + 1, keepdim=True))) - 2)
        nearest = (blocks.abs() / scale).clamp(max=6.0)[..., None].sub(grid).abs().argmin(dim=-1)
        return (grid[nearest] * scale * blocks.sign()).flatten(dim, dim + 1)

    return rounded


def rows_of_sizes(step: int) -> Tensor:
    """Rows whose sizes are from 1/16 to 2,048."""
    return torch.randn(64, 32) * torch.exp2(torch.randint(-4, 12, (64, 1)).float())


def test_blocks_of_unlike_values_are_named(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, in_blocks(0), rows_of_sizes)
    assert (finding.rule, finding.severity, finding.evidence["cause"]) == (
        "cast-flushes", "warning", "blocks of unlike values",
    )  # fmt: skip
    assert finding.evidence["flushed"] > 0.4  # type: ignore[operator]
    assert finding.figure == "zero_heatmap"  # the rule's own is of values as a recorded cast holds them


@each(
    "module, batch",
    [
        (Apply(in_blocks(1)), rows_of_sizes),
        (Apply(in_blocks(0)), normal()),
        (Apply(lambda x: nn.functional.hardshrink(x, 8.0)), rows_of_sizes),
        (Apply(lambda x: x.bfloat16().float().relu()), rows_of_sizes),
        (Apply(lambda x: torch.sign(x) * (x.abs() > 1)), normal()),
        (Quantised(127, 0), with_outlier(500.0)),
        (Quantised(127), with_outlier(20.0)),
        (Quantised(7), normal()),
        (Quantised(1), normal()),  # three values by intent
        (Apply(lambda x: nn.functional.hardshrink(x, 3.0)), with_outlier(500.0)),
        (Apply(lambda x: torch.where(x == x.amax(dim=1, keepdim=True), x, 0.0)), with_outlier(500.0)),
        (Apply(torch.relu), with_outlier(500.0)),
    ],
)
def test_fine_grids_and_sparse_modules_are_not(
    tmp_path: Path, module: nn.Module, batch: Callable[[int], Tensor]
) -> None:
    assert found(tmp_path, module, batch) == []


@each("largest, size", [(127, 0.01), (127, 0.05), (7, 0.02)])
def test_a_scale_of_a_quiet_batch_is_named(tmp_path: Path, largest: int, size: float) -> None:
    (finding,) = found(tmp_path, Quantised(largest, once=True), quiet_first(size))
    assert (finding.rule, finding.severity, finding.since_step) == ("cast-saturates", "warning", 1)
    assert finding.evidence["saturated"] > 0.5 and "saturate" in finding.meaning  # type: ignore[operator]


@each(
    "module, batch",
    [
        (Quantised(127, once=True), quiet_first(1.0)),
        (Quantised(127, once=True), quiet_first(0.7)),
        (Quantised(127), quiet_first(0.01)),
        (Apply(lambda x: x.clamp(-0.01, 0.01)), normal()),
        (Apply(lambda x: x.clamp(-0.125, 0.125)), normal()),
        (Apply(torch.sign), normal()),
        (nn.Hardtanh(), normal(50.0)),
        (nn.ReLU6(), normal(100.0)),
        (nn.LayerNorm(32), normal(100.0)),
    ],
)
def test_bounds_that_move_or_are_meant_are_not(
    tmp_path: Path, module: nn.Module, batch: Callable[[int], Tensor]
) -> None:
    assert found(tmp_path, module, batch) == []


class Codes(nn.Module):
    """Codes of a range times a step from the largest value, of all batches or the first; clamped, or INT8 as it is."""

    def __init__(self, lowest: int, highest: int, *, once: bool = False, wraps: bool = False) -> None:
        super().__init__()
        self.range, self.once, self.wraps, self.top = (lowest, highest), once, wraps, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if self.top == 0 or not self.once:
            self.top = x.detach().abs().amax()
        step = self.top / self.range[1]
        codes = (x.detach() / step).round()
        codes = codes.int().to(torch.int8).float() if self.wraps else codes.clamp(*self.range)
        return x + (codes * step - x).detach()


def louder(step: int) -> Tensor:
    return (1 + step / 2) * torch.randn(64, 32).abs()


POSITIVE: Callable[[int], Tensor] = lambda step: torch.rand(64, 32)  # noqa: E731


@each(
    "module, batch, cause",
    [
        (Codes(0, 255), normal(), "negative inputs cut to zero"),
        (Codes(0, 127), lambda step: 0.5 + torch.randn(64, 32), "negative inputs cut to zero"),
        (Codes(-128, 127, once=True, wraps=True), louder, "large values come back negative"),
        (Codes(-127, 127), normal(), ""),
        (Codes(0, 255), POSITIVE, ""),
        (Codes(0, 255), lambda step: torch.randn(64, 32).abs() - 0.01, ""),
        (nn.Sequential(nn.Linear(32, 32), Codes(0, 255)), normal(), ""),
        (nn.ReLU(), normal(), ""),
        (Apply(lambda x: x.clamp(0.0, 6.0)), normal(), ""),
        (Codes(-128, 127, once=True), POSITIVE, ""),
        (nn.Sequential(nn.Linear(32, 32), Codes(-128, 127)), POSITIVE, ""),
        (Apply(lambda x: Codes(-128, 127)(x * (1 - 2.0 * (torch.rand(x.shape) < 0.5)))), POSITIVE, ""),
    ],
)
def test_codes_that_lose_or_turn_the_sign_are_named(
    tmp_path: Path, module: nn.Module, batch: Callable[[int], Tensor], cause: str
) -> None:
    findings = found(tmp_path, module, batch, ["cast-saturates"])
    assert [(f.severity, f.evidence["cause"]) for f in findings] == ([("warning", cause)] if cause else [])


# -- dropout


@each("drop, inner", [(0.95, nn.Dropout), (0.92, nn.Dropout), (0.97, nn.Dropout), (0.95, nn.Dropout1d)])
def test_a_dropout_of_nearly_all_is_named(tmp_path: Path, drop: float, inner: type[nn.Module]) -> None:
    (finding,) = found(tmp_path, inner(drop), normal(width=128))  # type: ignore[call-arg]
    assert (finding.rule, finding.severity, finding.evidence["cause"]) == ("structural-zeros", "warning", "dropout")
    assert "dropout" in finding.meaning and abs(float(finding.evidence["zeros"]) - drop) < 0.03


@each(
    "module",
    [
        nn.Dropout(0.5),
        nn.Dropout(0.8),
        nn.Dropout(0.95).eval(),
        nn.ReLU(),
        Apply(lambda x: torch.relu(x - 2)),
        Apply(lambda x: x * (torch.rand_like(x) > 0.95)),  # a mask divides nothing
        Apply(lambda x: torch.where(x.abs() >= x.abs().flatten().kthvalue(x.numel() - 100).values, x, 0.0)),
        nn.Hardshrink(2.0),
    ],
)
def test_usual_dropouts_masks_and_sparse_outputs_are_not(tmp_path: Path, module: nn.Module) -> None:
    assert found(tmp_path, module, normal(width=128)) == []


# -- outputs that are 1


class Ratio(nn.Module):
    """A policy's likelihoods over those of the last draw; a draw is every tenth call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.drawn = 0, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.drawn = x.detach().clone() if self.calls % 10 == 0 else self.drawn
        self.calls += 1
        return (x - self.drawn).exp()


class Rounded(nn.Module):
    """Decays near 1 that BF16 has made 1: they are no parameter, and have no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.9999).bfloat16().float()


@each("module, is_named", [(Ratio(), False), (Rounded(), True)])
def test_a_ratio_to_itself_is_1_and_a_rounded_decay_too(module: nn.Module, is_named: bool, tmp_path: Path) -> None:
    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores, self.inner = nn.Linear(8, 32), module

        def forward(self, x: Tensor) -> Tensor:
            scores = self.scores(x)
            return (self.inner(scores) * scores.tanh()).mean()

    torch.manual_seed(0)
    model, path = Policy(), tmp_path / str(is_named)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x = torch.randn(64, 8)
    with pl.watch(model, optimizer, run=path, every=10, quiet=True):
        for _ in range(60):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
    found = diagnose(path, rules=["outputs-alike"])
    assert [finding.where[0] for finding in found] == ["inner:output"] * is_named
