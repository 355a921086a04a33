"""Experiment `tf32` (T10, T2, A1): TF32, training in it, and its speed on a GPU.

A TF32 product rounds its inputs to FP32's exponent and FP16's mantissa, multiplies exactly and adds up in FP32. That is
measured on any machine: errors of emulated products against FP64, FP16 and BF16, within FP16's range and beyond it. The
loops that are said to differ by one argument or by two lines are compared as text and run (`loops`).

Rates need a GPU. With ``--device cuda`` three claims come to the others: two of the rates, and that the device's own
products err as the emulated ones do. Without, nothing is claimed of them, and the result says that they were not
measured.
"""

import contextlib
import difflib
import inspect
import io
import math
import statistics
import tokenize
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.emulate import emulate
from plimsoll.precision import prepare
from plimsoll.rounding import cast
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.formats import tf32_by_bits
from plimsoll_lab.result import Claim, Measured, claims as claims_of, of_rows
from plimsoll_lab.running.workers import one_thread
from plimsoll_lab.statistics import largest
from plimsoll_lab.study import Experiment

# -- training loops that differ by one argument or two lines -----------------------------------------------------------

Batches = Sequence[tuple[Tensor, Tensor]]
LoopOf = Callable[[nn.Module, torch.optim.Optimizer, Batches], list[float]]
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


def fp32_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tf32_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    losses: list[float] = []
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fp16_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bf16_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amp_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    scaler = torch.amp.GradScaler(batches[0][0].device.type)
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plimsoll_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, precision: str = "tf32"
) -> list[float]:
    losses: list[float] = []
    with prepare(model, optimizer, precision) as loop:
        for x, y in batches:
            with loop.forward():
                loss = functional.mse_loss(model(x), y)
            loop.step(loss)
            losses.append(loss.item())
    return losses


def changed_tokens(one: LoopOf, other: LoopOf) -> int:
    """Return how many tokens of one body another changes; a replaced one counts once."""
    matcher = difflib.SequenceMatcher(None, _tokens(one), _tokens(other), autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def changed_lines(one: LoopOf, other: LoopOf, *, indents: bool = True) -> tuple[int, int]:
    """Return how many lines a body adds and lacks; `indents`: those count too."""
    here, there = ([line if indents else line.strip() for line in _body(loop)] for loop in (one, other))
    lines = list(difflib.ndiff(here, there))
    return sum(line.startswith("+ ") for line in lines), sum(line.startswith("- ") for line in lines)


@contextlib.contextmanager
def settings_restored() -> Generator[list[Any]]:
    """Yield the places of torch's settings that the two lines write, and restore them."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv]
    before = [place.fp32_precision for place in places]
    try:
        yield places
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _body(loop: LoopOf) -> list[str]:
    lines = inspect.getsource(loop).splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.endswith("-> list[float]:")) + 1 :]


def _tokens(loop: LoopOf) -> list[str]:
    text = inspect.cleandoc("\n".join(_body(loop)))
    read = tokenize.generate_tokens(io.StringIO(text + "\n").readline)
    return [token.string for token in read if token.type not in _LAYOUT]


# -- the experiment ----------------------------------------------------------------------------------------------------

FORMATS = ("fp32", "tf32", "fp16", "bf16")
SCALES = (0, 100, -50)  # powers of two that both inputs are multiplied by: within FP16, and beyond it at both ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Measured errors of products, root mean squares over all of them.

    - `error`: by format and scale, the error of the product as a share of its norm; Inf where it is not finite.
    - `inputs`: by format, the error that rounding makes in the two inputs together.
    - `differing`: values in which the emulated TF32 product is another than that of inputs rounded by bits.
    - `device`: the error of the device's own TF32 product, None where it has none.
    """

    error: Mapping[tuple[str, int], float]
    inputs: Mapping[str, float]
    differing: int
    device: float | None


def errors(products: int, size: int, seed: int, device: str) -> Errors:
    """Measures so many products of normal matrices."""
    generator = torch.Generator().manual_seed(seed)
    squares = {(name, scale): 0.0 for name in FORMATS for scale in SCALES}
    inputs, differing, own = dict.fromkeys(FORMATS, 0.0), 0, 0.0
    for _ in range(products):
        a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
        exact = a.double() @ b.double()
        for name, scale in squares:
            squares[name, scale] += _off(_product(a, b, name, scale), exact) ** 2
        for name in FORMATS:
            inputs[name] += sum(_off(cast(each, name), each.double()) ** 2 for each in (a, b))
        differing += int((_product(a, b, "tf32", 0) != (tf32_by_bits(a) @ tf32_by_bits(b)).double()).sum())
        if device == "cuda":
            own += _off(_own(a, b), exact) ** 2
    return Errors(
        error={key: math.sqrt(square / products) for key, square in squares.items()},
        inputs={name: math.sqrt(square / products) for name, square in inputs.items()},
        differing=differing,
        device=math.sqrt(own / products) if device == "cuda" else None,
    )


def _product(a: Tensor, b: Tensor, name: str, scale: int) -> Tensor:
    """Return the product times 2^scale, with that undone, in the format alone.

    It is exact but for the format and FP32's accumulation.

    One input is brought back before the product where its result would leave FP32: what is rounded is the scaled one.
    """
    factor = 2.0**scale
    if name == "fp32" or scale:
        rounded = [cast(each * factor, name).double() / factor for each in (a, b)]
        return (rounded[0].float() @ rounded[1].float()).double()
    with emulate(forward=name):
        return (a @ b).double()


def _own(a: Tensor, b: Tensor) -> Tensor:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        return (a @ b).double()
    finally:
        matmul.fp32_precision = before


def _off(found: Tensor, exact: Tensor) -> float:
    share = float((found.double() - exact).square().sum().sqrt() / exact.square().sum().sqrt())
    return share if math.isfinite(share) else math.inf


_REPEATS = 20


def rates(size: int) -> Mapping[str, float]:
    """Return products' median rate by format, in 10^12 operations a second."""
    found: dict[str, float] = {}
    for name, dtype, precision in (
        ("fp32", torch.float32, "ieee"), ("tf32", torch.float32, "tf32"),
        ("fp16", torch.float16, "ieee"), ("bf16", torch.bfloat16, "ieee"),
    ):  # fmt: skip
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        with settings_restored() as (matmul, _):
            matmul.fp32_precision = precision
            found[name] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b) / 1e12
    return found


def _seconds(product: Callable[[], Tensor]) -> float:
    for _ in range(3):
        product()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


PRODUCTS, FULL_PRODUCTS = 4, 16
SIZE, FULL_SIZE = 256, 2048
RATE_SIZE = 8192
_BATCHES = 20  # of a loop
_LOOPS: Mapping[str, LoopOf] = {
    "fp32": fp32_loop, "tf32": tf32_loop, "fp16": fp16_loop, "bf16": bf16_loop, "amp": amp_loop,
    "plimsoll": plimsoll_loop,
}  # fmt: skip


def measure(bench: Bench) -> Measured:
    """The products, the loops, and on a GPU the rates."""
    bench.progress.begin("products, loops, rates", 3)
    with one_thread():
        found = errors(_products(bench), FULL_SIZE if bench.full else SIZE, bench.seed, bench.device)
        bench.progress.advance()
        losses, settings = trained(bench.seed, bench.device)
    bench.progress.advance()
    rate = rates(RATE_SIZE) if bench.device == "cuda" else None
    bench.progress.advance()
    checked = claims(found, losses, settings, rate)
    return Measured(trainings=(), claims=checked, said=_said(found, losses, rate))


def trained(seed: int, device: str) -> tuple[Mapping[str, list[float]], int]:
    """Return each loop's losses, and the number of settings that the TF32 loop makes."""
    batches = _batches(seed, device)
    losses: dict[str, list[float]] = {}
    settings = 0
    for name, loop in _LOOPS.items():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
        with settings_restored() as places:
            losses[name] = loop(model, torch.optim.SGD(model.parameters(), lr=0.1), batches)
            if name == "tf32":
                settings = sum(place.fp32_precision == "tf32" for place in places)
    return losses, settings


def _batches(seed: int, device: str) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(32, 1, generator=generator) / math.sqrt(32)
    inputs = [torch.randn(64, 32, generator=generator) for _ in range(_BATCHES)]
    return [(x.to(device), (x @ weight).tanh().to(device)) for x in inputs]


def claims(
    found: Errors, losses: Mapping[str, Sequence[float]], settings: int, rate: Mapping[str, float] | None
) -> tuple[Claim, ...]:
    """Return the experiment's claims; those on the device's numbers if there are any."""
    of_device = () if rate is None or found.device is None else (*_of_rates(rate), _of_device(found, found.device))
    return (
        *of_rows((*_of_digits(found), *_of_range(found)), "T2"),
        *of_rows((*_of_text(), *_of_loops(losses, settings), *of_device), "T10"),
        *of_rows(_of_amp(), "A1"),
    )


def _of_digits(found: Errors) -> tuple[Claim, ...]:
    error = {name: found.error[name, 0] for name in FORMATS}
    return claims_of(
        f"""
        inputs-rounded | inputs_rounded | at most 0 values differ
            | a TF32 product is FP32's of inputs rounded to 19 bits, to the last bit
        only-inputs | only_inputs | at least 0.95 and at most 1.05 of their error
            | its error is that of the rounded inputs
        digits-of-fp16 | error.tf32 / error.fp16 | at least 0.95 and at most 1.05 of FP16's error
            | TF32 has FP16's digits: products of inputs within FP16's range err alike
        digits-over-bf16 | error.bf16 / error.tf32 | at least 7.6 and at most 8.4 of TF32's error
            | BF16 has three bits fewer: its products err eight times as much
        digits-under-fp32 | error.tf32 / error.fp32 | at least {2.0**8} of FP32's error
            | FP32 has thirteen bits more: TF32's error is far above its
        """,
        error=error,
        inputs_rounded=found.differing,
        only_inputs=error["tf32"] / found.inputs["tf32"],
    )


def _of_range(found: Errors) -> tuple[Claim, ...]:
    """Return claims at 2^100 and 2^-50, beyond FP16; powers of two change no more."""
    high, low = SCALES[1:]
    kept = {
        name: largest(abs(found.error[name, scale] / found.error[name, 0] - 1) for scale in (high, low))
        for name in ("tf32", "bf16")
    }
    return claims_of(
        """
        range-of-bf16 | kept.tf32 | at most 0.001 of the error
            | TF32 has FP32's range: inputs times 2^100 or 2^-50 err as they do without
        bf16-range | kept.bf16 | at most 0.001 of the error | so has BF16
        fp16-overflows | fp16_overflows | at least 1 products
            | FP16 has not: times 2^100 the product is no longer finite
        fp16-underflows | fp16_underflows | at least 1.0 of the product | FP16: times 2^-50 nothing is left
        """,
        kept=kept,
        fp16_overflows=float(found.error["fp16", high] == math.inf),
        fp16_underflows=found.error["fp16", low],
    )


def _of_text() -> tuple[Claim, ...]:
    added, removed = changed_lines(fp32_loop, tf32_loop)
    return claims_of(
        """
        bf16-one-argument | bf16_one_argument | at least 1 and at most 1 tokens
            | from FP16 to BF16 one argument of the loop changes
        tf32-two-lines | added | at least 2 and at most 2 lines | from FP32 to TF32 two lines are added
        tf32-nothing-else | removed | at most 0 lines | and none is changed
        """,
        added=added,
        removed=removed,
        bf16_one_argument=changed_tokens(fp16_loop, bf16_loop),
    )


def _of_amp() -> tuple[Claim, ...]:
    return claims_of(
        """
        amp-five-lines | amp_five_lines | at least 5 and at most 5 lines
            | from FP32 to automatic mixed precision five lines are new: a scaler, autocast
        """,
        amp_five_lines=changed_lines(fp32_loop, amp_loop, indents=False)[0],
    )


def _of_loops(losses: Mapping[str, Sequence[float]], settings: int) -> tuple[Claim, ...]:
    last = {name: each[-1] / losses["fp32"][-1] for name, each in losses.items()}
    worst = largest(abs(each - 1) for each in last.values())
    differing = sum(a != b for a, b in zip(losses["plimsoll"], losses["fp32"], strict=True))
    return claims_of(
        """
        settings-made | settings | at least 2 and at most 2 settings
            | the two lines, run, set torch's products and convolutions to TF32
        loops-train | worst | at most 0.05 of FP32's loss | all loops, run, end where FP32 does
        level-computes | differing | at least 1 losses
            | level tf32 of plimsoll.prepare computes in TF32 here: losses are not FP32's
        """,
        differing=differing,
        settings=settings,
        worst=worst,
    )


def _of_rates(rate: Mapping[str, float]) -> tuple[Claim, ...]:
    return claims_of(
        """
        rate-half-of-fp16 | rate.tf32 / rate.fp16 | at least 0.4 and at most 0.6 of FP16's rate
            | TF32's rate is half of FP16's
        rate-above-fp32 | rate.tf32 / rate.fp32 | at least 2.0 of FP32's rate | TF32's rate is well above FP32's
        """,
        rate=rate,
    )


def _of_device(found: Errors, own: float) -> Claim:
    """Return the claim on tensor cores, which may cut bits and err twice as much."""
    return Claim("device-agrees", "the device's own TF32 products err as the emulated ones, or as cut bits do",
                 own / found.error["tf32", 0], at_least=0.9, at_most=2.2, unit="of the emulated error")  # fmt: skip


def _said(found: Errors, losses: Mapping[str, Sequence[float]], rate: Mapping[str, float] | None) -> tuple[str, ...]:
    error = ", ".join(f"{name.upper()} {found.error[name, 0]:.2e}" for name in FORMATS)
    loss = ", ".join(f"{name} {each[-1]:.5f}" for name, each in losses.items())
    rated = "not measured: rates need a GPU (--device cuda), and nothing is claimed of them here"
    if rate is not None:
        rated = ", ".join(f"{name.upper()} {value:.0f}" for name, value in rate.items()) + " Tflop/s"
    return (f"Error of products: {error}.", f"Last loss of each loop: {loss}.", f"Rates: {rated}.")


def _products(bench: Bench) -> int:
    return bench.steps or (FULL_PRODUCTS if bench.full else PRODUCTS)


def _settings(bench: Bench) -> Mapping[str, object]:
    return {
        "products": _products(bench), "size": FULL_SIZE if bench.full else SIZE, "batches": _BATCHES,
        "device": bench.device, "rates": "measured" if bench.device == "cuda" else "not measured: no GPU",
    }  # fmt: skip


TF32 = Experiment(
    name="tf32",
    claim="TF32 has BF16's range and FP16's digits; BF16 is one changed argument, TF32 two lines.",
    source="T10, T2, A1",
    settings=_settings,
    measure=measure,
)
