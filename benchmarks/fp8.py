"""What FP8 costs or saves: one linear layer, forward and backward, against bfloat16 and torchao's tensorwise recipe.

    python benchmarks/fp8.py                     the CPU: what emulating FP8 costs there, at small sizes
    python benchmarks/fp8.py --device cuda       a GPU: the goals, compiled, and a GPT block of width 4096
    python benchmarks/fp8.py --quick             a smoke run

The goals, on an H200, against bfloat16 of the same compiled layer: 1.0 times as fast at 2048^3, 1.4 at 4096^3, 1.7 at
8192^3; 1.15 times torchao; no kernel that looks for a magnitude in the trace; a GPT block 1.25 times end to end, its
loss within 0.5 % after 500 steps. All contenders run in one process, in turns.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import Results, Timing, interleave
from torch import Tensor, nn

from plimsoll import fp8

Step = Callable[[], object]
GOALS = {2048: 1.0, 4096: 1.4, 8192: 1.7}
NOT_MEASURED = "not measured yet"


def contenders(size: int, device: str, dtype: torch.dtype) -> dict[str, Step]:
    """One step each: forward and backward of a layer of size by size, on a batch of as many rows."""
    torch.manual_seed(0)
    plain = nn.Linear(size, size, bias=False, device=device, dtype=dtype)
    layers = {str(dtype).removeprefix("torch."): plain}
    layers["fp8 unit"] = fp8.Linear(size, size, bias=False, device=device, dtype=dtype)
    layers["fp8 tensor"] = fp8.convert(copy.deepcopy(plain), "tensor")
    layers["fp8 delayed"] = fp8.convert(copy.deepcopy(plain), "tensor", history=16)
    if device == "cuda":
        from torchao.float8 import convert_to_float8_training

        layers["torchao tensorwise"] = convert_to_float8_training(nn.Sequential(copy.deepcopy(plain)))
    else:
        layers["float32"] = copy.deepcopy(plain).float()
    return {name: step_of(layer, size, device) for name, layer in layers.items()}


def step_of(layer: nn.Module, size: int, device: str) -> Step:
    """A call that runs forward and backward; compiled on a GPU."""
    dtype = next(layer.parameters()).dtype
    x = torch.randn(size, size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(size, size, device=device, dtype=dtype)
    call = torch.compile(layer) if device == "cuda" else layer

    def step() -> None:
        x.grad = None
        layer.zero_grad()
        call(x).backward(gradient)

    step()  # the first compiles
    return step


def linear_table(sizes: Sequence[int], device: str, rounds: int) -> list[dict[str, object]]:
    """A row a size and contender: milliseconds, and how many times as fast as bfloat16."""
    rows: list[dict[str, object]] = []
    for size in sizes:
        found = interleave(contenders(size, device, torch.bfloat16), device=device, rounds=rounds)
        base = found["bfloat16"]
        for name, timing in found.items():
            goal = GOALS.get(size) if name == "fp8 unit" and device == "cuda" else None
            rows.append(
                {"size": f"{size}^3", "layer": name, "ms": timing.median * 1e3, "x bfloat16": base.ratio(timing),
                 "x torchao": over(found, timing), "goal": goal}
            )  # fmt: skip
    return rows


def over(found: dict[str, Timing], timing: Timing) -> float | str:
    """How many times as fast as torchao's."""
    rival = found.get("torchao tensorwise")
    return NOT_MEASURED if rival is None else rival.ratio(timing)


def reductions(size: int) -> list[str]:
    """The kernels in one unit-scaled step whose names say that they reduce."""
    step = contenders(size, "cuda", torch.bfloat16)["fp8 unit"]
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step()
    names = [event.key for event in found.key_averages()]
    return [name for name in names if any(word in name.lower() for word in ("amax", "reduce", "red_", "_per_"))]


class Block(nn.Module):
    """A GPT block: causal attention and a feed-forward layer, before each a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        parts = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def block_table(width: int, steps: int) -> list[dict[str, object]]:
    """End to end: a block learns a fixed map for so many steps, in bfloat16 and in FP8, and its steps are timed."""
    torch.manual_seed(0)
    plain = Block(width, width // 128).cuda().bfloat16()
    target = Block(width, width // 128).cuda().bfloat16()
    models = {"bfloat16": plain, "fp8 tensor": fp8.convert(copy.deepcopy(plain), "tensor")}
    models["fp8 delayed"] = fp8.convert(copy.deepcopy(plain), "tensor", history=16)
    calls, losses = {}, {}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        compiled, seen = torch.compile(model), torch.Generator("cuda").manual_seed(1)

        def step(compiled=compiled, optimizer=optimizer, seen=seen, name=name) -> None:
            x = torch.randn(4, 2048, width, device="cuda", dtype=torch.bfloat16, generator=seen)
            with torch.no_grad():
                wanted = target(x)
            losses[name] = nn.functional.mse_loss(compiled(x).float(), wanted.float())
            losses[name].backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(steps):
            step()
        losses[name] = float(losses[name])
        calls[name] = step
    final = dict(losses)
    found = interleave(calls, device="cuda", rounds=7)
    return [
        {"block": name, "ms a step": timing.median * 1e3, "x bfloat16": found["bfloat16"].ratio(timing),
         f"loss after {steps}": final[name], "off bfloat16's": final[name] / final["bfloat16"] - 1}
        for name, timing in found.items()
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--threads", type=int, default=1, help="of torch, on a CPU")
    parser.add_argument("--out", type=Path, help="folder of the result; none with --quick")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    results = Results("FP8 linear layers", options.device)
    sizes = (256,) if options.quick else (512, 1024) if options.device == "cpu" else tuple(GOALS)
    note = "Forward and backward of one layer without bias, batch as many rows; > 1 is faster than bfloat16."
    if options.device == "cpu":
        note += f" A CPU has no FP8 units: this is what computing FP8's results costs there. On a GPU: {NOT_MEASURED}."
    results.add("One linear layer", note, linear_table(sizes, options.device, 3 if options.quick else 9))
    if options.device == "cuda":
        found = reductions(sizes[0])
        results.add(
            "Kernels that reduce, in a unit-scaled step", "Goal: none.", [{"kernels": ", ".join(found) or "none"}]
        )
        size, steps = (512, 10) if options.quick else (4096, 500)
        results.add("A GPT block", f"Width {size}, batch 4 by 2048, compiled, AdamW.", block_table(size, steps))
    if not options.quick:
        results.write("fp8", **({"folder": options.out} if options.out else {}))


if __name__ == "__main__":
    main()
