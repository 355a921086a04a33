"""Plimsoll's own tensors are on the devices of the user's, whatever torch's default device is."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import plimsoll as pl
from tests.support.cases import each

MODEL, X, MATRIX = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(6, 8), torch.randn(64, 64)


def into_columns(_: Path) -> None:
    pl.cast(MATRIX, "e4m3", out=torch.empty_strided((64, 64), (1, 64), device="cpu"))
    for fmt in ("mxfp8_e4m3", "e2m1"):
        pl.pack(MATRIX.t(), fmt)


def trained(level: str, scaler: str | None = None) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = pl.watch(model, optimizer, run=path, every=1, quiet=True)
        with watch, pl.prepare(model, optimizer, level, watch=watch, scaler=scaler) as loop:
            for _ in range(4):
                with loop.forward():
                    loss = model(X.to(model[0].weight.dtype)).float().square().mean()
                loop.step(loss)

    return run


USES: dict[str, Callable[[Path], object]] = {
    "cast and pack": into_columns,
    "microscope": lambda _: pl.microscope(MODEL, lambda: MODEL(X).square().mean(), draws=3),
    "audit": lambda _: pl.unit.audit(MODEL, X),
    "convert": lambda _: pl.unit.convert(MODEL, X),
    "locate": lambda _: pl.locate(lambda: MODEL(X / 0).mean(), model=MODEL),
    "autocast": trained("amp-bf16"),
    "a scaler": trained("amp-fp16"),
    "a scaler by spectra": trained("amp-fp16", "spectral"),
    "a scaler by layer": trained("amp-fp16", "layer"),
    "masters": trained("fp16-master"),
}


@each("use", USES)
def test_it_works_where_torch_makes_tensors_elsewhere(use: str, tmp_path: Path) -> None:
    with torch.device("meta"):  # any other device than the CPU; tensors there have no values
        USES[use](tmp_path / use)
