"""Is the error of a training bias or noise? Shadow steps of one that cuts digits off, and the rule that says so."""

import tempfile

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import plimsoll as pl

FOLDER = tempfile.mkdtemp()


def train(rounding: str) -> pl.Run:
    """Train a small model whose results are rounded to BF16 in one way. Every second step has a shadow."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    path = f"{FOLDER}/{rounding}"
    with pl.watch(model, optimizer, run=path, every=2, shadow_every=2):
        for _ in range(24):
            x = torch.randn(64, 64)
            with pl.emulate(forward="bf16", backward="bf16", rounding=rounding):
                F.cross_entropy(model(x), x[:, :10].argmax(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return pl.Run(path)


for rounding in ("toward_zero", "nearest_even"):
    run = train(rounding)
    _, errors = run.series("gradients", "0.0.weight", "relative_error")
    _, along = run.series("gradients", "0.0.weight", "along_reference")  # negative: too small
    _, flips = run.scalars("flips:model:output")
    found = [finding for finding in pl.diagnose(run) if finding.rule == "biased-rounding"]
    print(f"{rounding}: the gradient's error is {errors.mean():.2%}, along the gradient {along.mean():+.2%}.")
    print(f"    {flips.mean():.1%} of the classes flip. {found[0] if found else 'No bias was found.'}")
    assert bool(found) == (rounding == "toward_zero")
    assert (along.mean() < -0.002) == (rounding == "toward_zero")
