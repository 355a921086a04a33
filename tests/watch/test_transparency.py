"""P1: watching changes nothing, and leaves nothing behind."""

import contextlib
import copy
import gc
import io
import pickle
import re
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from tests.support.cases import each
from tests.support.versions import only_from
from tests.support.watch.recording import batches, mlp, only_run, train


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return self.head(x + torch.tanh(x) * x)  # three ways through one tensor: the order of summing shows


def trained(dtype: torch.dtype, compiled: bool, watched: Path | None) -> tuple[list[float], dict[str, Tensor], Tensor]:
    torch.manual_seed(5)
    model = Dropping().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    w = None if watched is None else pl.watch(model, optimizer, run=watched, every=2, warmup=3)
    call = torch.compile(model, fullgraph=True) if compiled else model
    data = [x.to(dtype) for x in batches(12 if compiled else 50, 16, 8)]
    losses = train(call, optimizer, data)
    if w is not None:
        w.close()
    torch.compiler.reset()
    return losses, model.state_dict(), torch.get_rng_state()


@pytest.mark.parametrize(
    ("dtype", "compiled"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]
)
def test_training_is_the_same_to_the_bit(dtype: torch.dtype, compiled: bool, tmp_path: Path) -> None:
    bare, watched = trained(dtype, compiled, None), trained(dtype, compiled, tmp_path / "run")
    assert bare[0] == watched[0]
    assert torch.equal(bare[2], watched[2])
    assert all(torch.equal(bare[1][name], watched[1][name]) for name in bare[1])
    run = only_run(tmp_path / "run")
    assert run.spectrum("activations", "layers.3:output", 2).count == 16 * 32
    assert run.spectrum("activation_gradients", "layers.3:output", 2).count == 16 * 32


@only_from("2.13", "an Inductor that keeps casts in vectorised code for CPUs")
def test_training_compiled_in_bf16_is_the_same_when_casts_are_kept(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    with inductor.patch(emulate_precision_casts=True):
        bare, watched = trained(torch.bfloat16, True, None), trained(torch.bfloat16, True, tmp_path / "run")
    assert bare[0] == watched[0]
    assert all(torch.equal(bare[1][name], watched[1][name]) for name in bare[1])


def test_where_a_tap_moves_rounding_it_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import torch._inductor.config  # what is said depends on its settings

    model = mlp().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
        train(call, optimizer, [x.bfloat16() for x in batches(3, 4, 8)])
    assert [event.kind for event in only_run(tmp_path / "run").events()].count("rounding") == 1
    assert caplog.text.count("emulate_precision_casts = True in both") == 1


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def seams() -> list[object]:
        scaler = torch.amp.GradScaler
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        return [torch.autograd.backward, plateau.step, scaler.scale, scaler.step, scaler.update, sys.excepthook,
                signal.getsignal(signal.SIGTERM), len(_global_optimizer_pre_hooks)]  # fmt: skip

    before = seams()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    w, other = (pl.watch(model, optimizer, run=tmp_path / name) for name in "ab")
    train(model, optimizer, batches(2, 4, 8))
    assert seams() != before
    w.close()
    w.close()
    assert seams() != before
    other.close()
    assert seams() == before
    for module in model.modules():
        hooks = {key: value for key, value in vars(module).items() if "hook" in key and value}
        assert not hooks, hooks
    with pytest.raises(pl.ArgumentError, match=r"Watch.flush: expected an open watch; got one of .*a that is closed"):
        w.flush()


def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores, labels)


def of_probabilities(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.nll_loss(scores.softmax(1).log(), labels)


def masked(scores: Tensor, labels: Tensor) -> Tensor:
    future = torch.ones(len(scores), len(scores), dtype=torch.bool).triu(1)
    mixed = (scores @ scores.T).masked_fill(future, -1e9).softmax(1) @ scores
    return functional.cross_entropy(mixed, labels)


@each("loss_of", [cross_entropy, of_probabilities, masked, functional.multi_margin_loss])
def test_a_loss_in_a_checkpoint_is_computed_as_often_as_without_a_watch(
    loss_of: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    def run(watched: bool) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(3)
        model = Dropping()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        losses: list[float] = []
        with (
            pl.watch(model, optimizer, run=tmp_path / loss_of.__name__, every=2)
            if watched
            else contextlib.nullcontext()
        ):
            for x in batches(30, 16, 8):
                labels = (x[:, 0] > 0).long()
                optimizer.zero_grad()
                # Each run of the forward moves the batch norm's statistics.
                loss = checkpoint(lambda x, y: loss_of(model(x), y), x, labels, use_reentrant=False)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return model.state_dict(), losses

    (plain, losses), (state, others) = run(False), run(True)
    assert losses == others
    assert all(torch.equal(plain[name], state[name]) for name in plain)


def test_kept_tensors_are_read_in_one_place_that_runs_no_checkpoint_again() -> None:
    numbers = "dim|reduction|ignore_index|is_causal|training"
    for file in (Path(pl.__file__).parent / "watch").rglob("*.py"):
        assert re.findall(rf"\._saved_(?!(?:{numbers})\b)\w+", file.read_text(encoding="utf-8")) == [], file


def test_hooks_do_not_leak_into_copies_and_checkpoints(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1) as w:
        train(model, optimizer, batches(1, 4, 8))
        twin = copy.deepcopy(model)
        pickled = pickle.dumps((model, optimizer))
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        for content in (pickled, saved.getvalue()):
            assert b"plimsoll" not in content
        loaded, _ = pickle.loads(pickled)
        for other in (twin, loaded):
            other(torch.randn(4, 8)).sum().backward()
        assert w.step_index == 0
        model.to(torch.float64).to(torch.float32)
        train(model, optimizer, batches(1, 4, 8))
    run = only_run(tmp_path / "run")
    assert [run.spectrum("activations", "0:input", step).count for step in run.steps] == [32, 32]


def test_the_model_owns_its_watch(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pl.watch(model, optimizer, run=tmp_path / "run", every=1)
    train(model, optimizer, batches(3, 4, 8))
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert list(only_run(tmp_path / "run").steps) == [0, 1, 2]


def test_two_watches_on_one_model(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pl.watch(model, optimizer, run=tmp_path / "a", every=1),
        pl.watch(model, optimizer, run=tmp_path / "b", every=2, collect=("gradients",)),
    ):
        train(model, optimizer, batches(3, 4, 8))
    a, b = only_run(tmp_path / "a"), only_run(tmp_path / "b")
    assert list(a.steps) == [0, 1, 2] and list(b.steps) == [0, 2]
    assert a.spectrum("gradients", "0.weight", 2) == b.spectrum("gradients", "0.weight", 2)


def test_the_room_is_the_function() -> None:
    import plimsoll.watch

    assert callable(plimsoll.watch) and plimsoll.watch.watch.__module__ == "plimsoll.watch.handle"
