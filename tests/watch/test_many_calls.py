"""Modules that are called many times a step: one row a series, and never a loss that is left out."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import kernels
from tests.support.watch.recording import batches, only_run, same


class CellByCell(nn.Module):
    """A recurrent network by hand, whose first state comes back at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gate, self.head = nn.GRUCell(3, 5), nn.Sigmoid(), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = first = torch.zeros(len(x), 5)
        early = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            early = state if early is None else early
        assert early is not None
        return self.head(state + self.gate(early) + self.gate(first))


def trained(run: Path | None, calls: int, **settings: object) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = CellByCell()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w = None if run is None else pl.watch(model, optimizer, run=run, every=1, **settings)
    losses = []
    for x in batches(2, 2, calls, 3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if w is not None:
        w.close()
    return losses, model


def test_a_thousand_calls_a_step_are_recorded_whole_in_few_rows(tmp_path: Path) -> None:
    calls = 1000
    bare, watched = trained(None, calls), trained(tmp_path / "run", calls, max_tensors=2500)
    assert bare[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1].parameters(), watched[1].parameters(), strict=True))
    run = only_run(tmp_path / "run")
    assert run.scalars("loss")[1].tolist() == bare[0] and not run.dropped
    assert not [event for event in run.events() if event.kind == "capped"]
    for collection in ("activations", "activation_gradients"):
        assert run.spectrum(collection, "cell:output", 1).count == calls * 2 * 5
    assert run.spectrum("activations", "cell:input.0", 1).count == calls * 2 * 3
    assert run.spectrum("activations", "cell:input.1", 1).count == calls * 2 * 5
    assert run.spectrum("activations", "gate:input", 1).count == 2 * 2 * 5  # of a tensor that was seen long before
    assert run.spectrum("gradients", "cell.weight_hh", 1).count == 15 * 5


def test_what_is_added_up_early_is_what_is_added_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "late", 300)
    monkeypatch.setattr("plimsoll.watch.sample.BANK_ROWS", 32)
    trained(tmp_path / "early", 300)
    late, early = only_run(tmp_path / "late"), only_run(tmp_path / "early")
    found = 0
    for step, collection, name, spectrum in late.spectra():
        assert same(early.spectrum(collection, name, step), spectrum), (collection, name)
        found += 1
    assert found == len(list(early.spectra())) > 40


@pytest.mark.parametrize("block", [0, 32])
def test_rows_are_added_up_on_a_device_as_on_the_host(block: int) -> None:
    """What runs on a GPU, here on the CPU's tensors."""
    tensors = [*batches(6, 40), torch.zeros(3), torch.tensor([float("nan"), -3.0, 1e-40]), -torch.ones(5)]
    rows, bank = kernels.new_bank(len(tensors), block), kernels.new_bank(4, block)
    kernels.measure_into(tensors, rows, list(range(len(tensors))), block=block)
    other, targets = bank.clone(), [0, 1, 2, 1, 1, 0, 2, 1, 2]
    kernels.add_rows(bank, targets, rows)
    kernels.add_rows_by_torch(other, torch.tensor(targets), rows)
    exact = [word for word in range(bank.shape[1]) if word not in (8, 9, 10)]
    assert torch.equal(bank[:, exact], other[:, exact])
    sums, others = bank.view(torch.float64)[:, 8:11], other.view(torch.float64)[:, 8:11]
    assert torch.allclose(sums, others, rtol=1e-12, atol=0)


def test_numbers_are_not_dropped_where_spectra_are(tmp_path: Path) -> None:
    """A queue that is full of spectra takes numbers and events still."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, queue_bytes=1) as w:
        for step, x in enumerate(batches(120, 4, 64)):
            model(x).square().mean().backward()
            optimizer.step()
            w.log(index=step)
    run = only_run(tmp_path / "run")
    assert run.scalars("loss")[0].tolist() == run.scalars("index")[1].tolist() == list(range(120))


class Twice(nn.Module):
    """A module that is called twice on one tensor, then once on others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Sigmoid(), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = 2 * x[0]  # not an input of the model, which has a series of its own
        total = self.gate(first) + self.gate(first)
        for each in x[1:]:
            total = total + self.gate(2 * each)
        return self.head(total)


@pytest.mark.parametrize("rows", [1024, 32])
def test_a_tensor_that_one_module_sees_twice_counts_twice_and_others_once(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plimsoll.watch.sample.BANK_ROWS", rows)
    torch.manual_seed(0)
    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        first = torch.randn(4, 3)
        model([first, *torch.randn(100, 4, 3)]).square().mean().backward()
        optimizer.step()
    assert only_run(tmp_path / "run").spectrum("activations", "gate:input", 0).count == 102 * 12
