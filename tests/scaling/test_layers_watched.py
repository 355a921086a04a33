"""A watched model with layer scales: what is recorded are the true gradients, at whatever scale they were read."""

from pathlib import Path

import pytest
import torch

import plimsoll as pl
from plimsoll.scaling import LayerScaler
from tests.scaling.test_layers_exact import loss_of, with_exponents
from tests.support.scaling.layer_models import MODELS, D, made
from tests.support.watch.recording import only_run, same


def recorded(folder: Path, name: str, *, scaled: bool) -> dict[tuple[str, str], pl.Spectrum]:
    model, x = made(name), torch.randn(6, D, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = LayerScaler(model, device="cpu") if scaled else None
    if scaler is not None:
        with_exponents(scaler, 0)
    with pl.watch(model, optimizer, run=folder, every=1, collect=("gradients", "activation_gradients")):
        loss = loss_of(model(x))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return {(collection, series): s for _, collection, series, s in only_run(folder).spectra()}


@pytest.mark.parametrize("name", ["residual", "branching", "tied"])
def test_activation_gradients_are_recorded_without_the_layers_factor(tmp_path: Path, name: str) -> None:
    assert name in MODELS
    expected = recorded(tmp_path / "plain", name, scaled=False)
    found = recorded(tmp_path / "scaled", name, scaled=True)
    assert found.keys() == expected.keys() and any(collection == "activation_gradients" for collection, _ in found)
    for key, spectrum in expected.items():
        assert same(found[key], spectrum), key
    sources = {found[key].source.scale for key in found if key[0] == "activation_gradients"}
    assert len(sources) > 1  # they were read at scales of their own
