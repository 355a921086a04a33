"""Rows: formats, places, casts and their causes, emulation, wrappers of tensors, memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.errors import ArgumentError
from plimsoll.formats import Plan
from plimsoll.receipts import Row
from plimsoll.receipts.recording.values import Memory
from plimsoll.receipts.take import receipt
from plimsoll.watch.call_site import INSTALLED, Place
from tests.support.cases import each

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def products(rows: tuple[Row, ...], phase: str = "forward") -> list[Row]:
    return [row for row in rows if row.kind == "product" and row.phase == phase]


def causes(rows: tuple[Row, ...], phase: str = "forward") -> list[tuple[str | None, str]]:
    casts = [(row.cause, row.formats) for row in rows if row.kind == "cast" and row.phase == phase]
    return list(dict.fromkeys(casts))


def test_each_row_has_its_module_and_line():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4))])

        def forward(self, x: Tensor) -> Tensor:
            x = self.parts[0](x)  # first
            return self.parts[1](x) @ torch.ones(4, 1)  # second

    found = receipt(Model(), X)
    forward, backward = products(found.rows), products(found.rows, "backward")
    assert [(row.module, row.source_text.rpartition("# ")[2]) for row in forward] == [
        ("parts.0", "first"), ("parts.1.0", "second"), ("model", "second")
    ]  # fmt: skip
    assert {row.module for row in backward} == {"parts.0", "parts.1.0", "model"}
    assert all(row.source_line is not None and row.source_line.startswith("tests/receipts/") for row in forward)


def test_who_asked_for_a_cast():
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return F.softmax(y.float(), -1, dtype=torch.float64).type_as(x)

    with torch.autocast("cpu", torch.bfloat16):
        found = receipt(Model(8, 4), X)
    assert causes(found.rows) == [
        ("autocast", "fp32 -> bf16"), ("script", "bf16 -> fp32"), ("operation", "fp32 -> fp64"),
        ("script", "fp64 -> fp32"),
    ]  # fmt: skip
    assert {cause for cause, _ in causes(found.rows, "backward")} == {"backward"}


def test_autocast_keeps_the_casts_of_weights():
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(super().forward(x)))

    with torch.autocast("cpu", torch.bfloat16):
        kept = receipt(Model(8, 8), X)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        repeated = receipt(Model(8, 8), X)
    assert (kept.cache_misses, kept.cache_hits) == (2, 4)  # weight and bias; each is used twice more
    assert (repeated.cache_misses, repeated.cache_hits) == (6, 0)


def test_an_emulation_has_the_formats_that_it_emulates():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def step(**emulation: object) -> None:
        with pl.emulate(**emulation):
            model(X).sum().backward()

    found = receipt(model, step=lambda: step(forward="e4m3", backward="e5m2"))
    for phase, values in (("forward", {"e4m3"}), ("backward", {"e4m3", "e5m2"})):
        rows = products(found.rows, phase)
        assert {value for row in rows for value in row.operands} == values
        assert {(row.where, row.output, row.accumulate) for row in rows} == {("emulated", "fp32", "fp32")}
    found = receipt(model, step=lambda: step(precision="bf16"))
    for phase in ("forward", "backward"):
        rows = products(found.rows, phase)
        assert {(row.formats, row.where, row.accumulate) for row in rows} == {
            ("bf16 x bf16 -> bf16", "emulated", "fp32")
        }
    found = receipt(model, step=lambda: step(forward="mxfp8_e4m3", accumulate="e8m10"))
    assert {(row.operands, row.accumulate) for row in products(found.rows)} == {(("mxfp8_e4m3", "mxfp8_e4m3"), "tf32")}
    assert any("products emulated" in note for note in found.notes)


def test_casts_by_plimsolls_lists_are_those_of_autocast():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))

    def step(context: Any) -> None:
        with context:
            y, again = model(X), model(X)
        (y + again).float().sum().backward()

    def facts(context: Any) -> tuple[object, ...]:
        found = receipt(model, step=lambda: step(context))
        return {(row.operation, row.cause, row.where, row.calls, row.note) for row in found.rows}, found.cache_hits

    lists = facts(pl.emulate.Autocast(dtype=torch.bfloat16))
    assert lists == facts(torch.autocast("cpu", torch.bfloat16))
    found = receipt(model, step=lambda: step(pl.emulate("bf16")))
    asked = {(row.phase, row.cause) for row in found.rows if row.kind == "cast"}
    assert asked == {("forward", "autocast"), ("forward", "script"), ("backward", "backward")}


def test_fp8_layers_have_their_codes():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    pl.fp8.convert(model, "tensor", include=["0"])
    x = torch.linspace(-1, 1, 256).reshape(16, 16)
    plan = Plan(target="fp8", formats={"0": "e4m3"}, scales={"0": {"gradients": 4.0}})
    found = receipt(model, x, declared=plan)
    assert {row.operands for row in products(found.rows) if row.module == "0"} == {("e4m3", "e4m3")}
    assert {row.operands for row in products(found.rows, "backward") if row.module == "0"} == {("e5m2", "e4m3")}
    assert {row.output for row in found.rows if row.operation == "plimsoll.fp8_cast"} == {"e4m3", "e5m2"}
    assert found.deviations == ()


def test_a_checkpoint_runs_again():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    found = receipt(model, step=lambda: checkpoint(model, X, use_reentrant=False).sum().backward())
    assert {row.module for row in products(found.rows)} == {"0", "2"}
    assert {row.module for row in products(found.rows, "recomputation")} == {"0"}  # it stops at the last that is needed
    assert {row.module for row in products(found.rows, "backward")} == {"0", "2"}


class Held(Tensor):
    """A weight that is kept in eight bits, and calls itself FP32."""

    @staticmethod
    def __new__(cls, codes: Tensor) -> "Held":
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = pytree.tree_map_only(Held, lambda x: x.codes.to(torch.float32), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def test_a_wrapper_is_recorded_by_what_it_does():
    weight = Held(torch.ones(4, 8).to(torch.float8_e4m3fn))
    found = receipt(nn.Identity(), step=lambda: F.linear(X, weight))
    row = products(found.rows)[0]
    assert (row.operands, row.values, row.where) == (("fp32", "e4m3"), ("fp32", "e4m3"), "emulated")


def test_an_operator_of_somebody_else_is_known_by_its_name():
    @torch.library.custom_op("receipts_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        return x * 2

    found = receipt(nn.Identity(), step=lambda: torch.ops.receipts_test.twice(X.bfloat16()))
    row = next(row for row in found.rows if row.kind == "custom")
    assert (row.operation, row.operands, row.output) == ("receipts_test.twice", ("bf16",), "bf16")
    assert "Known by name only: receipts_test.twice." in found.notes


def test_memory_of_a_step():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randn(32, 64)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    found = receipt(model, step=step)
    weights = 4 * sum(p.numel() for p in model.parameters())
    memory = found.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, weights, 2 * weights)
    hidden, out = 4 * 32 * 256, 4 * 32 * 64
    # Kept: the first layer's output or the ReLU's, which the next one needs; the output, its square's input, the loss.
    assert hidden + out <= memory.activations <= 2 * hidden + 3 * out
    assert memory.peak >= 4 * weights
    first = products(found.rows)[0]
    assert first.bytes == 4 * (32 * 64 + 64 * 256 + 256) + hidden  # input, weight, bias, output


def test_memory_that_is_resized_and_freed():
    memory, x = Memory(), torch.ones(64)
    memory.of(x, "other")
    x.untyped_storage().resize_(0)  # as `fully_shard` frees what it has gathered
    memory.of(x)
    assert (memory.live["other"], memory.peak) == (0, 256)
    x.untyped_storage().resize_(1024)
    memory.of(x)
    assert (memory.live["other"], memory.peak) == (1024, 1024)
    del x
    assert memory.live["other"] == 0


def test_autocast_does_not_reach_a_model_on_meta():
    with torch.device("meta"):
        model, x = nn.Linear(64, 64), torch.empty(8, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = receipt(model, x, declared="amp-bf16")
    assert {deviation.kind for deviation in found.deviations} == {"product-wide"}
    assert any("autocast does not reach tensors on meta" in note for note in found.notes)


def test_both_ways_of_a_recurrent_layer_are_products():
    found = receipt(nn.LSTM(4, 8), torch.ones(3, 2, 4), declared="fp32")
    assert {row.phase for row in found.rows if row.kind == "product"} == {"forward", "backward"}
    assert {row.kind for row in found.rows if "rnn_layer" in row.operation} <= {"product"}  # oneDNN's own operations
    assert not found.deviations


def test_lines_are_named_below_the_folder_of_packages_or_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for file, name in ((f"{INSTALLED[0]}llama/model.py", "llama/model.py"), (str(tmp_path / "train.py"), "train.py")):
        assert Place(file=file, line=3).shown == f"{Path(name)}:3"
    assert Place().shown is None


def test_a_model_without_values():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1 << 16, 1 << 16, bias=False), nn.Softmax(-1)), torch.empty(8, 1 << 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(x.bfloat16().float()).sum().backward()
        optimizer.step()

    found = receipt(model, step=step, declared="fp32")
    assert found.memory.weights == found.memory.optimizer == 4 << 32
    assert products(found.rows)[0].accumulate is None
    assert [deviation.kind for deviation in found.deviations] == ["round-trip"]
    assert any("is unknown on this device" in note for note in found.notes)


def test_without_gradients():
    with torch.no_grad():
        found = receipt(nn.Linear(8, 4), X, declared="fp32")
    assert found.did == ("forward",)
    assert found.notes[0].startswith("No backward ran")


def test_an_output_with_a_loss():
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            return {"loss": y.square().mean(), "logits": y}

    found = receipt(Model(8, 4), X.bfloat16().float(), declared="fp32")
    assert found.did == ("forward", "backward")
    assert sum(row.calls for row in found.rows if row.operation == "aten.ones_like") == 1  # of the loss alone


def test_an_error_of_the_step_is_passed_on_and_nothing_stays():
    model = nn.Linear(8, 4)
    before = model.weight.detach().clone()

    def step() -> None:
        with torch.no_grad():
            model.weight.add_(1)
        model(X[:, :3])

    with pytest.raises(RuntimeError, match="shapes"):
        receipt(model, step=step)
    assert torch.equal(model.weight, before)
    assert torch._C._len_torch_dispatch_stack() == 0


MODEL = nn.Linear(8, 4)


@each(
    "call, said",
    [
        (lambda: receipt(nn.Linear), "expected model to be a torch.nn.Module; got model=type"),
        (lambda: receipt(MODEL), "expected a batch or a step; got neither"),
        (lambda: receipt(MODEL, X, step=lambda: None), "expected inputs or step; got step and 1 inputs"),
        (lambda: receipt(MODEL, step=3), "expected step to be a closure that runs one step; got step=int"),
        (lambda: receipt(MODEL, X, declared=3), "expected declared to be a level, a policy, a plan or a plan file"),
        (lambda: receipt(MODEL, X, declared="bf16"), "got declared='bf16', which can mean several"),
        (lambda: receipt(MODEL, X, declared="amp-b16"), "Did you mean amp-bf16"),
        (
            lambda: receipt(MODEL, X, declared="x"),
            "expected a level or a plan file (.toml); got declared='x'. Levels: ",
        ),
        (lambda: receipt(MODEL, X, declared="no.toml"), "got 'no.toml', which does not exist"),
        (lambda: receipt(MODEL, X, declared="fp8-unit"), "receipt: expected a unit-scaled model at fp8-unit"),
        (lambda: receipt(MODEL, X, declared=Plan(target="fp8", formats={"a": "bf16"})), "got 'a', which matches none"),
    ],
)
def test_mistakes_are_named(call, said: str):
    with pytest.raises(ArgumentError, match="^receipt: ") as raised:
        call()
    assert said in str(raised.value)


def test_inside_an_emulation_it_is_refused():
    with pl.emulate("bf16"), pytest.raises(ArgumentError, match="inside of step"):
        receipt(MODEL, X)
