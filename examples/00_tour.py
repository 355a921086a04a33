"""A small transformer's gradients: measured, judged for several formats, and checked by casting."""

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

import plimsoll as pl

STEPS, TOKENS, WIDTH, COLUMNS = 96, 64, 64, 48
torch.manual_seed(0)
console = Console(highlight=False)
fp16 = pl.formats.get("fp16")

# A three-layer transformer learns a rule for the next token. The gradient at each block's output is kept for measuring.
layers = [nn.TransformerEncoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)]
model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
gradients: dict[str, torch.Tensor] = {}
for i, layer in enumerate(layers):
    layer.register_full_backward_hook(lambda *hook, i=i: gradients.update({f"block {i}": hook[2][0]}))

console.print("[bold]1  A small transformer trains; the gradients of its activations are measured[/]\n")
by_step: list[pl.Spectrum] = []
for _ in range(STEPS):
    tokens = torch.randint(TOKENS, (32, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (7 * tokens + 3).flatten() % TOKENS)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    by_step.append(sum(pl.measure(gradients).values(), start=pl.Spectrum.empty()))  # spectra merge by addition
total = sum(by_step, start=pl.Spectrum.empty())

# The spectrogram: steps across, powers of two up, shade says how many values. Red is lost in FP16, yellow imprecise.
columns = [sum(by_step[i : i + STEPS // COLUMNS], start=pl.Spectrum.empty()) for i in range(0, STEPS, STEPS // COLUMNS)]
for exponent in range(-12, -32, -1):
    row = [s.binades[exponent + 149] / s.count for s in columns]
    zone = "green" if exponent >= fp16.min_exponent else "yellow" if exponent >= fp16.quantum_exponent - 1 else "red"
    line = Text(f"  2^{exponent:<4}")
    line.append("".join(" ░▒▓█"[min(4, int(10 * share + 0.95))] for share in row), style=zone)
    console.print(
        line.append({-14: "  FP16: precise above", -25: "  FP16: zero below"}.get(exponent, ""), style="bold")
    )
console.print(Text(f"        step 1{f'step {STEPS}':>{COLUMNS - 6}}\n", style="dim"))

console.print("[bold]2  What other formats would make of the same values; no second run is needed[/]\n")
table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
for head in ("format", "lost", "subnormal", "SNR", "scales that work", "lost at the best"):
    table.add_column(head, justify="left" if head == "format" else "right")
for name in ("fp16", "bf16", "e5m2", "e4m3"):
    fit, window, best = total.fit(name), total.window(name, tolerance=0.001), total.best_shift(name)
    serving = "none" if window is None else f"2^{window[0]} to 2^{window[1]}"
    left = "overflows at all" if best is None else f"{total.fit(name, shift=best).lost.estimate:.2%} at 2^{best}"
    table.add_row(
        name, f"{fit.lost.estimate:.1%}", f"{fit.subnormal.estimate:.1%}", f"{fit.snr_db:.0f} dB", serving, left
    )
console.print(table)

console.print("\n[bold]3  The check: cast the last step's gradients and count[/]\n")
shift = total.best_shift("fp16")
assert shift is not None
values = torch.cat([gradient.flatten() for gradient in gradients.values()])
nonzero = values[values != 0]
predicted, before = by_step[-1].fit("fp16").lost, (pl.cast(nonzero, "fp16") == 0).double().mean().item()
after = pl.cast(nonzero, "fp16", scale=2.0**shift)
assert predicted.low <= before <= predicted.high
assert after.isfinite().all()
console.print(f"  cast to fp16:                 {before:.2%} become zero; {predicted.estimate:.2%} was predicted")
console.print(f"  cast to fp16 at scale 2^{shift}:   {(after == 0).double().mean().item():.2%} become zero")

lost, left = total.fit("fp16").lost.estimate, total.fit("fp16", shift=shift).lost.estimate
verdict = (
    f"FP16 would lose {lost:.1%} of this network's activation gradients; a loss scale of 2^{shift} leaves {left:.2%}."
)
console.print(f"\n[bold green]Verdict[/]  {verdict}")
