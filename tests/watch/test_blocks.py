"""``watch(block=)``: what is recorded is what `measure` finds in the same tensors, and training is as it is without."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import row_layout
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run, RunWriter
from plimsoll.watch.ranks import collector
from plimsoll.watch.sample import Pool, Rows
from tests.support.cases import each
from tests.support.spectra import same_tables

STEPS = 3
Key = tuple[str, str, int]


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50))


def train(model: nn.Module, run: Path | None, **options: object) -> dict[Key, Tensor]:
    """The tensors that the run should speak of."""
    tensors: dict[Key, Tensor] = {}
    seen: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, a, y, name=name: seen.append((f"{name}:output", y.detach().clone())))
        for name, module in model.named_children()
    ]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    watched = pl.watch(model, optimizer, run=run, every=1, **options) if run is not None else None
    torch.manual_seed(1)
    for step in range(STEPS):
        x = torch.randint(0, 50, (16, 8))
        tensors |= {("weights", name, step): p.detach().clone() for name, p in model.named_parameters()}
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        tensors |= {("gradients", name, step): p.grad.clone() for name, p in model.named_parameters()}
        tensors |= {("activations", name, step): y for name, y in seen}
        seen.clear()
        optimizer.step()
    if watched is not None:
        watched.close()
    for hook in hooks:
        hook.remove()
    return tensors


@pytest.mark.parametrize("block", [16, 32])
def test_the_record_is_that_of_the_tensors(tmp_path: Path, block: int) -> None:
    tensors = train(model_of(), tmp_path / "run", block=block)
    run = Run(tmp_path / "run")
    assert run.settings["block"] == block and run.block_lengths == (block,)
    assert {where for where, _, _ in tensors} == {"weights", "gradients", "activations"}
    for (where, name, step), x in tensors.items():
        assert run.spectrum(where, name, step).blocks == pl.measure(x, block=block).blocks, (where, name)
    assert all(s.blocks is not None for *_, s in run.spectra("activation_gradients"))


@each("block, first", [(32, 1.6875), (16, 5 / 6)])
def test_weights_in_the_last_bin_of_their_block(tmp_path: Path, block: int, first: float) -> None:
    model = nn.Sequential(nn.Linear(40, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[0].weight[0] = 0
        model[1].weight.copy_(torch.tensor([0.9, -0.95, 0.8, 0.84, 0.85, 0.7, 0.99, 0.01]))
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    folder = tmp_path / f"run {block}"
    with pl.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=folder, every=1, block=block) as watching:
        watching.step()
    run = Run(folder)
    for name, p in weights.items():
        inside = 0
        for row in p.reshape(-1, p.shape[-1]).double():
            for part in row.abs().split(block):
                largest = float(part.max())
                bound = first * (2.0 ** math.floor(math.log2(largest)) if block == 32 else largest) if largest else 1
                inside += int((part >= bound - 1e-9).sum())
        _, shares = run.series("weights", name, "last_bin")
        assert shares[0] * p.numel() == pytest.approx(inside), name
    assert run.series("weights", "1.weight", "last_bin")[1][0] == pytest.approx(4 / 8 if block == 32 else 5 / 8)


def test_updates_and_the_optimizer_have_no_record(tmp_path: Path) -> None:
    train(model_of(), tmp_path / "run", block=32)
    run = Run(tmp_path / "run")
    for collection in ("updates", "optimizer"):
        assert run.tensors[collection]
        assert all(s.blocks is None and s.count for *_, s in run.spectra(collection))


def test_training_is_bit_for_bit_the_same(tmp_path: Path) -> None:
    plain, watched = model_of(), model_of()
    train(plain, None)
    train(watched, tmp_path / "run", block=32)
    for name, p in plain.named_parameters():
        assert torch.equal(p.view(torch.int32), watched.get_parameter(name).view(torch.int32)), name


def test_all_else_is_recorded_as_without(tmp_path: Path) -> None:
    for name, block in (("without", None), ("with", 32)):
        train(model_of(), tmp_path / name, block=block)
    without, found = Run(tmp_path / "without").table(), Run(tmp_path / "with").table(blocks=False).drop(["last_bin"])
    assert without.schema == found.schema and same_tables(without, found)


def test_rows_are_narrow_where_nothing_is_asked_for(tmp_path: Path) -> None:
    assert Rows(torch.device("cpu"), Pool()).banks[0].shape[1] == row_layout.NARROW
    assert Rows(torch.device("cpu"), Pool(32)).banks[0].shape[1] == row_layout.WIDE
    train(model_of(), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.block_lengths == () and run.settings["block"] is None


def test_micro_batches_are_added(tmp_path: Path) -> None:
    model = nn.Linear(40, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 40) * 2.0 ** (-8 * i) for i in range(3)]
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, block=32):
        for x in batches:
            model(x).square().sum().backward()
        optimizer.step()
    expected = sum(pl.measure(x, block=32) for x in batches).blocks
    assert Run(tmp_path / "run").spectrum("activations", "model:input", 0).blocks == expected


def test_a_sparse_gradient_has_the_blocks_of_its_zeros_too(tmp_path: Path) -> None:
    model = nn.Embedding(100, 40, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1, block=32):
        (model(torch.tensor([3, 5, 3])) * torch.randn(3, 40)).sum().backward()
        dense = model.weight.grad.to_dense()
        optimizer.step()
    assert Run(tmp_path / "run").spectrum("gradients", "weight", 0).blocks == pl.measure(dense, block=32).blocks


def test_a_compiled_model_records_the_same(tmp_path: Path) -> None:
    for name, wrap in (("eager", lambda m: m), ("compiled", lambda m: torch.compile(m, backend="aot_eager"))):
        model = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 8))
        torch.manual_seed(2)
        for p in model.parameters():
            nn.init.normal_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = wrap(model)
        with pl.watch(model, optimizer, run=tmp_path / name, every=1, block=32):
            for _ in range(2):
                called(torch.randn(4, 40)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    eager, compiled = Run(tmp_path / "eager"), Run(tmp_path / "compiled")
    names = set(eager.tensors["activations"]) & set(compiled.tensors["activations"])
    assert "0:output" in names
    for name in names:
        for step in range(2):
            found = compiled.spectrum("activations", name, step).blocks
            assert found is not None and found == eager.spectrum("activations", name, step).blocks
    found = compiled.spectrum("activation_gradients", "2:output", 1).blocks
    assert found is not None and found == eager.spectrum("activation_gradients", "2:output", 1).blocks


def test_the_flight_recorder_keeps_records(tmp_path: Path) -> None:
    model = nn.Linear(40, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []
    with pl.watch(
        model,
        optimizer,
        run=tmp_path / "run",
        every=100,
        collect=("weights",),
        recorder=("loss", "gradients"),
        block=16,
    ):
        for step in range(3):
            x = torch.full((2, 40), float("nan")) if step == 2 else torch.randn(2, 40)
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            kept.append(model.weight.grad.clone())
            optimizer.step()
    run = Run(tmp_path / "run")
    for step in range(3):
        found = run.spectrum("gradients", "weight", step)
        assert found.blocks is not None and found.blocks == pl.measure(kept[step], block=16).blocks


@pytest.mark.parametrize("block", [0, 8, 64, True, 32.0, "32", -16])
def test_other_block_lengths_are_refused(tmp_path: Path, block: object) -> None:
    with pytest.raises(
        ArgumentError, match=r"watch: expected block to be 32 \(MX formats\), 16 \(NVFP4\) or None; got"
    ):
        pl.watch(nn.Linear(2, 2), run=tmp_path / "run", block=block)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_blocks_of_nothing_that_is_collected_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"watch: expected collect to have some of weights, gradients, .* given"):
        pl.watch(nn.Linear(2, 2), run=tmp_path / "run", collect=("updates",), block=32)


def test_what_ranks_send_each_other_has_the_records(tmp_path: Path) -> None:
    """`ranks="reduce"`: tables become batches again."""
    tensors = train(model_of(), tmp_path / "sent", block=32)
    with RunWriter(tmp_path / "taken") as writer:
        for batch in collector._batches(Run(tmp_path / "sent").table(), writer):
            writer.write(batch)
    run = Run(tmp_path / "taken")
    for (where, name, step), x in tensors.items():
        assert run.spectrum(where, name, step).blocks == pl.measure(x, block=32).blocks
    assert all(s.blocks is None for *_, s in run.spectra("optimizer"))
