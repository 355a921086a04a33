"""Draws the figures of "Loss scaling explained", from real gradients and real scalers.

python docs/images/loss_scaling.py
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import nn

import plimsoll as pl
from plimsoll.scaling import DynamicScaler

WIDTH, LEFT, RIGHT = 760, 62, 18
GREY, BLUE, ORANGE, RED = "#808080", "#3b7dd8", "#e08a1e", "#d0453a"


def text(x: float, y: float, words: str, *, anchor: str = "middle", colour: str = GREY, size: int = 12) -> str:
    """Words at a place."""
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}" font-size="{size}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, *, colour: str = GREY, dash: str = "", width: float = 1.0) -> str:
    """A straight line."""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def save(name: str, height: int, title: str, parts: Sequence[str]) -> None:
    """Writes a picture beside this script."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" fill="none" '
        f'font-family="ui-sans-serif, sans-serif"><title>{escape(title)}</title>'
    )
    Path(__file__).with_name(name).write_text("\n".join([head, *parts, "</svg>"]) + "\n")


# -- the window: where gradients lie against what float16 holds ------------------------------------------------------

LOW, HIGH = -44, 19  # the binades that are drawn


def gradients() -> pl.Spectrum:
    """All weight gradients of a classifier of 25 layers, each of which passes back less than it gets."""
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (nn.Linear(128, 128), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    nn.functional.cross_entropy(model(torch.randn(256, 128)), torch.randint(10, (256,))).backward()
    return pl.measure(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))


def panel(spectrum: pl.Spectrum, shift: int, top: int, height: int) -> list[str]:
    """The spectrum's binades as bars, moved by the scale; coloured by what becomes of them in float16."""
    counts = {k - 149 + shift: int(n) for k, n in enumerate(spectrum.binades) if n}
    step, tallest, base = (WIDTH - LEFT - RIGHT) / (HIGH - LOW), max(counts.values()), top + height

    def x(binade: float) -> float:
        return LEFT + (binade - LOW) * step

    parts = [line(LEFT, base, WIDTH - RIGHT, base)]
    for binade, count in counts.items():
        if LOW <= binade < HIGH:
            colour = RED if binade < -25 or binade > 15 else ORANGE if binade < -14 else BLUE
            tall = max(1.5, (height - 26) * count / tallest)
            where = f'x="{x(binade):.1f}" y="{base - tall:.1f}" width="{step - 1.5:.1f}" height="{tall:.1f}"'
            parts.append(f'<rect {where} fill="{colour}"/>')
    parts += [line(x(edge), top + 4, x(edge), base, dash="4 3") for edge in (-24, -14, 16)]
    lost = spectrum.fit("fp16", shift=shift).lost.estimate
    much = f"{lost:.1%} of gradients are lost" if lost >= 0.0005 else "less than 0.05 % is lost"
    said = f"{f'scale 2^{shift}' if shift else 'no scale'}: {much}"
    parts.append(text(LEFT, top + 14, said, anchor="start", size=14))
    return parts


def window() -> None:
    """The same gradients twice, without and with a scale."""
    spectrum, height = gradients(), 150
    parts = [*panel(spectrum, 0, 8, height), *panel(spectrum, 16, 8 + height + 12, height)]
    base = 8 + 2 * height + 12
    step = (WIDTH - LEFT - RIGHT) / (HIGH - LOW)
    parts += [text(LEFT + (binade - LOW) * step, base + 18, f"2^{binade}") for binade in range(-40, 17, 8)]
    for edge, words in ((-34, "zero in float16"), (-19, "subnormal: fewer digits"), (1, "normal"), (17.5, "Inf")):
        colour = RED if edge in (-34, 17.5) else ORANGE if edge == -19 else BLUE
        parts.append(text(LEFT + (edge - LOW) * step, base + 38, words, colour=colour, size=13))
    save(
        "loss-scaling-window.svg",
        base + 48,
        "Gradients by binade against float16, without and with a loss scale",
        parts,
    )


# -- the burst: what two rules do after hard batches ------------------------------------------------------------------


def curve(scaler: Any, overflows: Callable[[int, float], bool], steps: int) -> list[float]:
    """The exponent of the scale after each step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, found = torch.optim.SGD([weight], lr=0.0), []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        if overflows(step, scaler.get_scale()):
            weight.grad = torch.full_like(weight, torch.inf)
        scaler.step(optimizer)
        scaler.update()
        found.append(math.log2(max(scaler.get_scale(), 2.0**-60)))
    return found


def burst() -> None:
    """Twenty hard batches at step 100; later, gradients that have grown for good."""
    steps, height, top, limit = 1000, 250, 16, 11
    low, high = -8, 18

    def overflows(step: int, scale: float) -> bool:
        return 100 <= step < 120 or (step >= 550 and scale > 2.0**limit)

    def at(step: float, exponent: float) -> tuple[float, float]:
        across = LEFT + step / steps * (WIDTH - LEFT - RIGHT)
        return across, top + (high - exponent) / (high - low) * height

    parts = [line(*at(0, low), *at(steps, low))]
    for exponent in range(-4, 17, 4):
        parts += [line(*at(0, exponent), *at(steps, exponent), width=0.3)]
        parts.append(text(LEFT - 8, at(0, exponent)[1] + 4, f"2^{exponent}", anchor="end"))
    for step in range(0, steps + 1, 200):
        parts.append(text(at(step, low)[0], at(0, low)[1] + 18, str(step)))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, at(0, low)[1] + 36, "step"))
    parts.append(line(*at(550, limit), *at(steps, limit), colour=RED, dash="4 3"))
    parts.append(text(*at(775, limit - 1.6), "above this, gradients overflow from step 550 on", colour=RED))
    for scaler, colour, words, place in (
        (torch.amp.GradScaler("cpu"), ORANGE, "torch.amp.GradScaler", (330, -5.4)),
        (DynamicScaler("cpu"), BLUE, "DynamicScaler", (420, 16.6)),
    ):
        points = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in (at(i, e) for i, e in enumerate(curve(scaler, overflows, steps)))
        )
        parts.append(f'<polyline points="{points}" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(*at(*place), words, colour=colour, size=13))
    save(
        "loss-scaling-burst.svg",
        top + height + 46,
        "The loss scale after a burst of 20 overflows, under two rules",
        parts,
    )


if __name__ == "__main__":
    window()
    burst()
