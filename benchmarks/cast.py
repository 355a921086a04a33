"""How fast casts are, against torch's round trip through float8_e4m3fn and other libraries; and who is right.

    python benchmarks/cast.py                   16M float32 values on 1 and 2 threads
    python benchmarks/cast.py --quick           a smoke run
    python benchmarks/cast.py --device cuda     on a GPU: torch's and torchao's casts and ours

The goals, as ratios to the native round trip on two threads: `cast(out=...)` to any eXmY 0.40, MXFP8 to codes
and scales 0.30, MXFP4 2; stochastic rounding at most twice our own nearest-even; no memory beyond the result.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from _harness import Results, count, interleave, peak_extra_bytes, shown_count
from torch import Tensor

import plimsoll
from plimsoll.formats import E4M3, MXFP8_E4M3

NATIVE = "torch .to(float8_e4m3fn).to(float32)"
ELEMENTS = ("e4m3", "e5m2", "e5m7", "fp16", "bf16", "e2m1")
BLOCKS = ("mxfp8_e4m3", "mxfp4", "nvfp4")
COLUMNS = 4096  # the matrix's width; blocks run along it
PATIENCE_SECONDS = 180  # for a peer that compiles itself

Calls = dict[str, Callable[[], object]]


@contextlib.contextmanager
def patience(seconds: int = PATIENCE_SECONDS) -> Iterator[None]:
    """Raises TimeoutError in the main thread when the block takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Peers:
    """The calls of other libraries that work here, and why the others do not."""

    def __init__(self) -> None:
        self.calls: Calls = {}
        self.missing: dict[str, str] = {}

    def offer(self, name: str, make: Callable[[], Callable[[], object]]) -> None:
        """Takes a call that imports and runs within the limit; else notes the reason."""
        try:
            with patience(), np.errstate(all="ignore"):
                call = make()
                call()
        except Exception as error:  # noqa: BLE001  (a peer may fail in any way, and the table must say how)
            self.missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]
        else:
            self.calls[name] = call


def ours(x: Tensor) -> Calls:
    """Every cast of the table, into memory that is there already where the function takes it."""
    out = x.clone()  # written once, so that its pages are there before memory is measured
    calls: Calls = {}
    for name in ELEMENTS:
        calls[f"cast {name}"] = lambda name=name: plimsoll.cast(x, name, out=out)
    calls["cast e4m3 stochastic"] = lambda: plimsoll.cast(x, "e4m3", rounding="stochastic", generator=1, out=out)
    for name in BLOCKS:
        calls[f"cast {name}"] = lambda name=name: plimsoll.cast(x, name, out=out)
        calls[f"pack {name}"] = lambda name=name: plimsoll.pack(x, name)
    return calls


def element_peers(x: Tensor, peers: Peers) -> None:
    """E4M3 values by other libraries, each from what it takes fastest to the values in float32."""
    values = x.numpy()

    def by_ml_dtypes() -> Callable[[], object]:
        import ml_dtypes

        return lambda: values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    def by_gfloat() -> Callable[[], object]:
        import gfloat
        import gfloat.formats

        return lambda: gfloat.round_ndarray(gfloat.formats.format_info_ocp_e4m3, values, sat=True)

    peers.offer("ml_dtypes e4m3", by_ml_dtypes)
    peers.offer("gfloat e4m3", by_gfloat)
    for rounding in ("nearest", "stochastic"):
        peers.offer(f"qtorch e4m3 {rounding}", lambda rounding=rounding: _by_qtorch(x, rounding))


def _by_qtorch(x: Tensor, rounding: str) -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from qtorch.quant import float_quantize  # builds its C++ on first import
    return lambda: float_quantize(x, exp=4, man=3, rounding=rounding)


def block_peers(x: Tensor, peers: Peers, *, compiled: bool = True) -> None:
    """Codes and scales by torchao, eager and compiled."""

    def by_torchao(element: torch.dtype, compiled: bool) -> Callable[[], object]:
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        function = torch.compile(to_mx, dynamic=False) if compiled else to_mx
        return lambda: function(x, element, 32)

    def nvfp4_by_torchao(compiled: bool) -> Callable[[], object]:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        def quantize(values: Tensor) -> object:
            return nvfp4_quantize(values, 16, values.abs().amax() / (448 * 6))

        function = torch.compile(quantize, dynamic=False) if compiled else quantize
        return lambda: function(x)

    for how in (False, True)[: 1 + compiled]:
        label = "compiled" if how else "eager"
        peers.offer(f"torchao mxfp8_e4m3 {label}", lambda how=how: by_torchao(torch.float8_e4m3fn, how))
        peers.offer(f"torchao mxfp4 {label}", lambda how=how: by_torchao(torch.float4_e2m1fn_x2, how))
        peers.offer(f"torchao nvfp4 {label}", lambda how=how: nvfp4_by_torchao(how))


def speed(results: Results, options: argparse.Namespace) -> None:
    """One table a size and thread count."""
    for size in options.sizes:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(max(1, size // COLUMNS), min(size, COLUMNS), generator=generator).to(options.device)
        for threads in options.threads:
            torch.set_num_threads(threads)
            peers = Peers()
            if options.device == "cpu":
                element_peers(x, peers)
            block_peers(x, peers, compiled=not options.quick)
            native: Calls = {NATIVE: lambda x=x: x.to(torch.float8_e4m3fn).to(torch.float32)}
            calls = native | {f"ours: {name}": call for name, call in ours(x).items()} | peers.calls
            found = interleave(calls, device=options.device, rounds=3 if options.quick else 7)
            lines: list[dict[str, object]] = [
                {
                    "what": name,
                    "ms": timing.median * 1e3,
                    "ns/value": timing.median / x.numel() * 1e9,
                    "ratio to native": timing.ratio(found[NATIVE]),
                    "ratio to our nearest e4m3": timing.ratio(found["ours: cast e4m3"]),
                    "spread": timing.spread,
                }
                for name, timing in found.items()
            ]
            where = f"{threads} thread(s)" if options.device == "cpu" else "cuda"
            note = "; ".join(f"{name} is missing: {why}" for name, why in peers.missing.items())
            results.add(f"{shown_count(size)} float32 values, {where}", note or "Every peer ran.", lines)


def correctness(results: Results) -> None:
    """How many of all 65,536 bf16 patterns each gets different from OCP E4M3, and of 226 hard MX blocks."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = patterns.to(torch.float32).reshape(16, -1)
    peers = Peers()
    peers.calls[NATIVE] = lambda: x.to(torch.float8_e4m3fn).to(torch.float32)
    peers.calls["ours"] = lambda: plimsoll.cast(x, "e4m3")
    element_peers(x, peers)
    lines = []
    for name, call in peers.calls.items():
        if "stochastic" not in name:
            with np.errstate(all="ignore"):
                found = torch.as_tensor(call()).to(torch.float64).numpy()
            wrong = min((_differs(found, _e4m3(x.numpy(), saturate)) for saturate in (True, False)), key=np.sum)
            signs = np.signbit(found) != np.signbit(x.numpy())
            lines.append(
                {
                    "what": name,
                    "wrong": int(wrong.sum()),
                    "of": wrong.size,
                    "wrong sign of zero": int((signs & (found == 0) & ~wrong).sum()),
                    "for example": _example(x, found, wrong),
                }
            )
    note = "Counted in the overflow mode (saturating or not) that suits each best. 0 and -0 are equal under `wrong`."
    results.add("bf16 patterns that become another value than OCP E4M3, nearest even", note, lines)
    blocks = torch.tensor([[np.nextafter(np.float32(2.0**k), np.float32(0))] * 32 for k in range(-100, 126)])
    lines = [{"what": name, "wrong": wrong, "of": len(blocks)} for name, wrong in _wrong_blocks(blocks).items()]
    note = "Scale rule floor (OCP MX 1.0 section 6.3); wrong: another scale than the specification's."
    results.add("MXFP8 E4M3 blocks whose maximum is one ulp below a power of two", note, lines)


def _e4m3(values: np.ndarray, saturate: bool) -> np.ndarray:
    return E4M3.decode(E4M3.encode(values, saturate=saturate))


def _differs(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    return ~((found == expected) | (np.isnan(found) & np.isnan(expected)))


def _example(x: Tensor, found: np.ndarray, wrong: np.ndarray) -> str:
    """A finite example of moderate size if there is one."""
    values = x.numpy()
    for where in (wrong & (np.abs(values) <= E4M3.max) & (np.abs(values) >= 1), wrong & np.isfinite(values), wrong):
        if where.any():
            value, got = values[where][-1], found[where][-1]
            return f"{value:g} becomes {got:g}, not {_e4m3(np.array(value), saturate=True):g}"
    return "-"


def _wrong_blocks(blocks: Tensor) -> dict[str, int]:
    """Scales that are not 2**(floor(log2(absmax)) - 8), as frexp has it."""
    exponents = torch.frexp(blocks[:, 0].double()).exponent - 1 - MXFP8_E4M3.element.max_exponent
    expected = (exponents + 127).tolist()

    def scales_by_gfloat() -> list[int]:
        import gfloat.formats

        info = gfloat.formats.format_info_mxfp8_e4m3
        found = (gfloat.compute_scale_amax(info.etype.emax, block) for block in blocks.numpy())
        return [int(np.frexp(scale)[1]) - 1 + 127 for scale in found]

    def scales_by_torchao() -> list[int]:
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        return to_mx(blocks, torch.float8_e4m3fn, 32)[0].view(torch.uint8).flatten().tolist()

    found = {"ours": plimsoll.pack(blocks, "mxfp8_e4m3").scales.view(torch.uint8).flatten().tolist()}
    for name, call in (("gfloat", scales_by_gfloat), ("torchao eager", scales_by_torchao)):
        with contextlib.suppress(ImportError):
            found[name] = call()
    return {
        name: sum(mine != wanted for mine, wanted in zip(scales, expected, strict=True))
        for name, scales in found.items()
    }


def memory(results: Results, options: argparse.Namespace) -> None:
    """Peak memory beside the input and `out`, each figure from a fresh process."""
    size = max(options.sizes)
    lines = []
    for index, name in enumerate(ours(torch.zeros(1, COLUMNS))):
        command = [sys.executable, __file__, "--device", options.device, "--probe", f"{index}:{size}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        lines.append({"what": name, "KB": float(done.stdout), "result KB": _result_bytes(name, size) / 1024})
    results.add(
        f"Peak extra memory, {shown_count(size)} float32 values", "result: the codes and scales; 0 with out=.", lines
    )


def _result_bytes(name: str, size: int) -> float:
    how, _, fmt = name.partition(" ")
    return plimsoll.formats.get(fmt).bits / 8 * size if how == "pack" else 0


def run_probe(text: str, device: str) -> None:
    """In the fresh process: warms up on a small tensor, then prints the kilobytes that the real one takes."""
    index, size = (int(part) for part in text.split(":"))
    torch.set_num_threads(1)
    list(ours(torch.randn(2, COLUMNS).to(device)).values())[index]()
    call = list(ours(torch.ones(size // COLUMNS, COLUMNS).to(device)).values())[index]
    print(peak_extra_bytes(call, device) / 1024)


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, lists parsed and defaults by device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", help="values in the tensor, default 16M")
    parser.add_argument("--threads", default="1,2", help="CPU threads, default 1,2")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds, nothing compiled")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.sizes = [count(s) for s in (options.sizes or ("256K" if options.quick else "16M")).split(",")]
    options.threads = [1] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    return options


def main() -> None:
    """Runs all tables and writes them, unless it is a smoke run without a folder to write to."""
    options = options_from()
    if options.probe:
        run_probe(options.probe, options.device)
        return
    results = Results("cast", options.device)
    if options.device == "cpu":
        correctness(results)
    speed(results, options)
    memory(results, options)
    if options.out or not options.quick:
        results.write("cast", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
