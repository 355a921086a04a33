"""Models of all kinds: what runs twice, what is shared, checkpointed, frozen, compiled, or made of no tensors."""

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit import Audit, Row, audit


def row(found: Audit, name: str) -> Row:
    return next(r for r in found.rows if r.name == name)


def names(found: Audit) -> list[str]:
    return [r.name for r in found.operations]


class Block(nn.Module):
    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(16, 16), nn.Linear(16, 16), how

    def inner(self, x: Tensor) -> Tensor:
        return self.b(functional.gelu(self.a(x))) + x

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def stack(how: str) -> nn.Module:
    torch.manual_seed(0)
    shared = Block(how)
    return nn.Sequential(nn.Linear(16, 16), shared, Block(how), shared)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_checkpointing_gives_the_rows_of_the_model_without(how: str) -> None:
    x = torch.randn(8, 16)
    wanted, found = audit(stack("plain"), x), audit(stack(how), x)
    assert names(found) == names(wanted) and len(names(found)) == 13
    for a, b in zip(found.rows, wanted.rows, strict=True):
        assert (a.forward, a.backward, a.absence) == (b.forward, b.backward, b.absence), a.name
    assert all(r.backward is not None for r in found.operations)


def test_a_shared_module_has_a_row_for_each_call() -> None:
    found = audit(stack("plain"), torch.randn(8, 16))
    assert names(found)[1:5] == ["1.a linear", "1 gelu", "1.b linear", "1 add"]
    assert names(found)[-4:] == ["1.a linear #2", "1 gelu #2", "1.b linear #2", "1 add #2"]
    assert row(found, "1.a linear").forward != row(found, "1.a linear #2").forward
    assert [r.name for r in found.parameters].count("1.a.weight") == 1


def test_views_and_copies_have_rows_if_asked_only() -> None:
    class Moves(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b = (2 * x).chunk(2, dim=-1)
            y = torch.cat([a.mT.contiguous(), b.mT], dim=-1)[:, :4].reshape(-1)
            y = functional.dropout(y, training=False) + torch.zeros(y.shape)
            return y.to(torch.float64).view(-1, 2).detach().clone()

    found = audit(Moves(), torch.randn(4, 8))
    assert names(found) == ["model mul", "model add", "model to"]
    assert row(found, "model to").dtype == "float64"
    every = audit(Moves(), torch.randn(4, 8), every=True)
    assert {"chunk", "mT", "contiguous", "cat", "getitem", "reshape", "dropout", "zeros", "view", "detach"} <= {
        r.operation for r in every.operations
    }
    assert [r.output for r in every.operations if r.operation == "chunk"] == [0, 1]


def test_no_two_rows_have_one_key() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            same = functional.dropout(x * 2, 0.5, training=False)  # its input itself
            return functional.dropout(same, 0.5, training=True)

    rows = pl.unit.audit(Model(), torch.randn(4, 8), every=True).rows
    assert [row.operation for row in rows] == ["input", "mul", "dropout", "dropout"]
    assert len({row.key for row in rows}) == len(rows)


def test_a_result_that_nothing_uses_may_be_one_of_several() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.linear(x).chunk(2)[0])

    rows = pl.unit.audit(Model(), torch.randn(4, 8), every=True).rows
    parts = [row for row in rows if row.operation == "chunk"]
    assert [row.backward is None for row in parts] == [False, True] and parts[1].absence == "never came"


def test_what_has_no_gradient_says_why() -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.free = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.free(x)
            y = self.frozen(x)
            unused = self.free(y)
            _ = unused * 2
            return self.free(y) + shift.mean()

    found = audit(Parts(), torch.randn(4, 8))
    absences = {r.name: r.absence for r in found.rows}
    assert absences == {
        "model input": "frozen", "free linear": "no_grad", "frozen linear": "frozen", "free linear #2": "never came",
        "model mul": "never came", "free linear #3": None, "model mean": "frozen", "model add": None,
        "frozen.weight": "frozen", "frozen.bias": "frozen", "free.weight": None, "free.bias": None,
    }  # fmt: skip
    assert math.isnan(row(found, "frozen linear").backward_std)


def test_nan_and_inf_are_seen_and_come_first() -> None:
    class Spoils(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.inner(x)
            masked = scores.masked_fill(torch.eye(8, dtype=torch.bool), float("-inf"))
            return masked.softmax(-1) * 2.0**-20 + torch.log(scores)

    torch.manual_seed(0)
    found = audit(Spoils(), torch.randn(8, 8))
    assert row(found, "model masked_fill").forward.neg_infs == 8
    assert row(found, "model log").forward.nans > 10
    worst = [(r.row.name, r.direction) for r in found.worst]
    # log spoils what comes after it, forward and backward; a mask spoils nothing.
    assert set(worst[:2]) == {("model log", "forward"), ("model add", "forward")}
    assert [r.spoiled > 0 for r in found.worst] == sorted([r.spoiled > 0 for r in found.worst], reverse=True)
    assert ("model masked_fill", "forward") not in [(r.row.name, r.direction) for r in found.worst if r.spoiled]


def test_attention_shows_what_is_inside_it() -> None:
    torch.manual_seed(0)
    attention, x = nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    found = audit(Self(), x)
    assert names(found) == [
        "attention linear", "attention scaled_dot_product_attention", "attention linear #2",
    ]  # fmt: skip
    wanted = attention(x, x, x, need_weights=False)[0]
    assert row(found, "attention linear #2").forward_std == pytest.approx(wanted.std(correction=0).item(), rel=1e-5)


def test_recurrent_layers_and_several_outputs() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x)[0][:, -1]

    model = Recurrent()
    found = audit(model, torch.randn(4, 6, 8))
    assert names(found) == ["lstm lstm", "lstm lstm [1]", "lstm lstm [2]"]
    assert row(found, "lstm lstm").backward is not None and row(found, "lstm lstm [1]").absence == "never came"
    assert all(r.backward is not None for r in found.parameters) and len(found.parameters) == 8
    assert all(p.grad is None for p in model.parameters())


def test_an_autograd_function_of_ones_own_is_one_operation() -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2 + x

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return Tripled.apply(self.inner(x)).sin()

    found = audit(Model(), torch.randn(4, 8))
    assert names(found) == ["inner linear", "model Tripled", "model sin"]
    tripled, linear = row(found, "model Tripled"), row(found, "inner linear")
    assert linear.backward_std == pytest.approx(3 * tripled.backward_std, rel=1e-6)


def test_embeddings_and_sparse_gradients() -> None:
    torch.manual_seed(0)
    model, tokens = nn.Embedding(50, 8, sparse=True), torch.arange(10)
    found = audit(model, tokens)
    assert names(found) == ["model embedding"] and not found.inputs
    gradient = found.parameters[0].backward
    assert gradient is not None and gradient.count == 400 and gradient.zeros == 320


def test_low_precision_and_autocast_and_emulation() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(8, 16)
    half = audit(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).bfloat16(), x.bfloat16())
    assert {r.dtype for r in half.rows} == {"bfloat16"}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = audit(model, x)
    assert row(found, "0 linear").dtype == "bfloat16" and row(found, "0.weight").dtype == "float32"
    with pl.emulate("fp16"):
        found = audit(model, x * 2.0**-30)
    assert row(found, "0 linear").dtype == "float16"


def test_complex_numbers_are_measured_by_their_parts() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(x * self.w).abs()

    found = audit(Spectral(), torch.randn(4, 8))
    assert row(found, "model fft_fft").forward.count == 64 and row(found, "model fft_fft").dtype == "complex64"


@pytest.mark.parametrize("rows", [0, 1])
def test_batches_of_one_and_of_none(rows: int) -> None:
    found = audit(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(rows, 8))
    assert [r.forward.count for r in found.operations] == [4 * rows] * 2
    assert str(found).startswith("Audit of Sequential: 2 operations") and json.dumps(found.to_dict(), allow_nan=False)
    assert (found.worst == ()) is (rows == 0)
    alone = audit(nn.Linear(8, 4), torch.randn(4, 8))
    assert str(alone).startswith("Audit of Linear: 1 operation,")
    assert "\n1 operation matched;" in str(alone.compare(alone))


def test_wrapped_and_compiled_models_have_their_own_names() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()), torch.randn(4, 8)
    assert audit(nn.DataParallel(model), x).rows == audit(model, x).rows
    assert audit(torch.compile(model, backend="eager"), x).rows == audit(model, x).rows


def test_what_cannot_be_audited_is_refused() -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    with pytest.raises(ArgumentError, match="audit: expected a torch.nn.Module; got function. Give the model itself"):
        audit(lambda x: x, x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ArgumentError, match="audit: expected an example that is a tensor, a tuple .*; got list. Write a batch"
    ):
        audit(model, [x])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="audit: expected an example that is a tensor, a tuple .*; got dict"):
        audit(model, {1: x})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="audit: expected loss to be None or a function .*; got float. Write"):
        audit(model, x, 1.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ArgumentError, match=r"audit: expected loss to return a floating scalar; got a tensor .*\(4, 4\)"
    ):
        audit(model, x, lambda y: y)
    with pytest.raises(
        ArgumentError, match="audit: expected loss to return a floating scalar; got 1.0 .float.. Reduce it"
    ):
        audit(model, x, lambda y: 1.0)  # pyright: ignore[reportArgumentType]
    with torch.inference_mode(), pytest.raises(ArgumentError, match="audit: expected a place where gradients can be"):
        audit(model, x)
    with pytest.raises(ArgumentError, match="audit: expected a model that gives a floating tensor; got Tensor. Give a"):
        audit(_Gives(torch.arange(3)), x)
    with pytest.raises(
        UnsupportedTensorError, match="parameters with their values here; got 'weight', one on the meta"
    ):
        audit(nn.Linear(8, 4, device="meta"), x)
    with pytest.raises(UnsupportedTensorError, match="got 'weight', one that is not initialized yet. Run a batch"):
        audit(nn.LazyLinear(4), x)


def test_sharded_parameters_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(8, 4)
        model.weight = nn.Parameter(distribute_tensor(model.weight, init_device_mesh("cpu", (1,))))
        with pytest.raises(UnsupportedTensorError, match="got 'weight', a DTensor, of which a part is elsewhere"):
            audit(model, torch.randn(4, 8))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_refused() -> None:
    with pytest.raises(ArgumentError, match="audit: expected a module that runs in Python; got a TorchScript one"):
        audit(torch.jit.script(nn.Linear(8, 4)), torch.randn(4, 8))


class _Gives(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value
