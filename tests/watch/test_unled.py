"""Training without an optimizer object."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plimsoll as pl
from tests.support.watch.recording import batches, mlp, only_run, same


class Words(nn.Module):
    """A small recurrent language model, as in a well-known example that trains without an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 6), nn.LSTM(6, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


def trained(run: Path | None, steps: int = 5) -> tuple[list[float], nn.Module, list[Tensor]]:
    model = Words()
    w = None if run is None else pl.watch(model, run=run, every=2)
    hidden = torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)
    generator, printed, weights = torch.Generator().manual_seed(0), [], []
    model.train()
    for _ in range(steps):
        tokens = torch.randint(11, (6, 3), generator=generator)
        model.zero_grad()
        hidden = tuple(state.detach() for state in hidden)
        output, hidden = model(tokens[:-1], hidden)
        loss = functional.cross_entropy(output, tokens[1:].flatten())
        loss.backward()
        weights.append(model.decoder.weight.detach().clone())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-2.0)
        printed.append(loss.item())
    if w is not None:
        w.close()
    return printed, model, weights


def test_a_language_model_that_is_trained_by_hand(tmp_path: Path) -> None:
    bare, watched = trained(None), trained(tmp_path / "run")
    assert bare[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(bare[1].parameters(), watched[1].parameters(), strict=True))
    run = only_run(tmp_path / "run")
    assert run.scalars("loss")[1].tolist() == bare[0] and run.steps == [0, 2, 4]
    assert run.spectrum("gradients", "decoder.weight", 4).count == 88
    assert run.spectrum("activations", "decoder:output", 2).count == 15 * 11
    assert run.spectrum("activation_gradients", "decoder:output", 2).count == 15 * 11
    for step in run.steps:
        assert same(run.spectrum("weights", "decoder.weight", step), bare[2][step])
    change = bare[2][3] - bare[2][2]
    assert same(run.spectrum("updates", "decoder.weight", 2), change)


@pytest.mark.parametrize("zeroed", ["before the forward", "after the forward", "to zero"])
def test_micro_batches_add_up_until_the_weights_move(zeroed: str, tmp_path: Path) -> None:
    model, printed = mlp(), []
    with pl.watch(model, run=tmp_path / "run", every=1):
        for index, x in enumerate(batches(6, 4, 8)):
            first = index % 2 == 0
            if first and zeroed != "after the forward":
                model.zero_grad(set_to_none=zeroed != "to zero")
            loss = model(x).square().mean() / 2
            if first and zeroed == "after the forward":
                model.zero_grad()
            loss.backward()
            printed.append(loss.item())
            if not first:
                kept = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
                with torch.no_grad():
                    for p in model.parameters():
                        p.sub_(0.1 * p.grad)
    run = only_run(tmp_path / "run")
    expected = [a + b for a, b in zip(printed[::2], printed[1::2], strict=True)]
    assert run.steps == [0, 1, 2] and run.scalars("loss")[1].tolist() == expected
    assert all(same(run.spectrum("gradients", name, 2), g) for name, g in kept.items())
    assert run.spectrum("activations", "0:input", 1).count == 2 * 32
    assert run.spectrum("weights", "0.weight", 1).count == 128


def test_an_optimizer_that_shows_at_its_first_step_ends_the_steps(tmp_path: Path) -> None:
    model = mlp()
    optimizer, printed, given = torch.optim.SGD(model.parameters(), lr=0.1), [], []
    with pl.watch(model, run=tmp_path / "run", every=1):
        for index, x in enumerate(batches(6, 4, 8)):
            loss = model(x).square().mean()
            loss.backward()
            printed.append(loss.item())
            if index % 3 == 2:
                given.append(model[0].weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
    run = only_run(tmp_path / "run")
    assert run.steps == [0, 1] and run.scalars("loss")[1].tolist() == [sum(printed[:3]), sum(printed[3:])]
    for step in (0, 1):
        assert same(run.spectrum("gradients", "0.weight", step), given[step])
        assert run.spectrum("weights", "0.weight", step).count == 128


def test_a_step_that_the_script_ends_itself(tmp_path: Path) -> None:
    model, printed = mlp(), []
    with pl.watch(model, run=tmp_path / "run", every=1) as w:
        for x in batches(3, 4, 8):
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-0.1)
            w.step()
            printed.append(loss.item())
    run = only_run(tmp_path / "run")
    assert run.steps == [0, 1, 2] and run.scalars("loss")[1].tolist() == printed
    assert run.spectrum("gradients", "0.weight", 2).count == run.spectrum("weights", "0.weight", 2).count == 128


def test_a_backward_alone_is_no_training(tmp_path: Path) -> None:
    model = mlp()
    with pl.watch(model, run=tmp_path / "run", every=1):
        model(torch.ones(3, 8)).sum().backward()
    assert only_run(tmp_path / "run").steps == []
