"""Autocast: every operation on the lists, in every way to call it, forward and backward, and nothing left behind."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from plimsoll.emulate.autocast import Autocast
from plimsoll.emulate.casting import CUDA
from plimsoll.emulate.dispatch import frame_entry, operation_kernels, thread_frame
from plimsoll.errors import ArgumentError
from tests.support.cases import each
from tests.support.emulate.calls import HIGH, LOW, NO_CPU_KERNEL, PROMOTE, made

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def test_the_tables_of_calls_are_whole() -> None:
    assert set(LOW) == CUDA.low - NO_CPU_KERNEL
    assert set(HIGH) == CUDA.high
    assert set(PROMOTE) == CUDA.promote


@each("name", sorted(LOW))
def test_low_operations_compute_in_the_low_dtype(name: str) -> None:
    with Autocast():
        assert LOW[name](FP32).dtype is LOW[name](FP16).dtype is FP16
    with Autocast(dtype=BF16):
        assert LOW[name](FP32).dtype is BF16
    assert LOW[name](FP32).dtype is FP32


@each("name", sorted(HIGH))
def test_high_operations_compute_in_fp32(name: str) -> None:
    with Autocast():
        result = HIGH[name](FP16)
        assert result.dtype is HIGH[name](FP32).dtype is FP32
    # FP32 of FP16 inputs, not FP16 results widened: the operation itself ran in FP32.
    assert torch.equal(result, widened(HIGH[name]))


def widened(call: Callable[..., Any]) -> Tensor:
    """The call in FP32 on the values that its FP16 inputs hold."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(call.__globals__, "made", lambda dtype, *shape: made(FP16, *shape).float())
        return call(FP16)


@each("name", sorted(PROMOTE))
def test_promoting_operations_take_the_widest(name: str) -> None:
    with Autocast():
        assert PROMOTE[name](FP16, FP16).dtype is FP16
        assert PROMOTE[name](FP16, FP32).dtype is FP32
        assert PROMOTE[name](FP32, FP16).dtype is FP32
        assert PROMOTE[name](FP32, FP32).dtype is FP32


def test_fp64_and_integers_are_left_alone() -> None:
    with Autocast():
        assert (made(FP64, 4, 4) @ made(FP64, 4, 4)).dtype is FP64
        assert torch.softmax(made(FP64, 4), 0).dtype is FP64
        assert torch.sum(torch.arange(4)).dtype is torch.int64


def test_a_dtype_that_the_call_names_stands() -> None:
    with Autocast():
        assert torch.softmax(made(FP16, 4), 0, dtype=FP16).dtype is FP16
        assert torch.softmax(made(FP16, 4), 0, FP64).dtype is FP64
        assert torch.sum(made(FP16, 4, 4), dtype=FP16).dtype is FP16
        assert torch.softmax(made(FP16, 4), 0, None).dtype is FP32


@each(
    "call",
    [lambda x, w: x @ w, lambda x, w: x.matmul(w), lambda x, w: x.mm(w), lambda x, w: torch.addmm(x, x, w),
     lambda x, w: x.addmm(x, w), lambda x, w: torch.mm(input=x, mat2=w), lambda x, w: F.linear(x, w, bias=w[0]),
     lambda x, w: torch.einsum("ij,jk->ik", x, w), lambda x, w: x.__rmatmul__(w),
     lambda x, w: torch.stack([x.T @ w, w @ x])],
)  # fmt: skip
def test_every_way_of_calling_is_seen(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    with Autocast():
        assert call(made(FP32, 4, 4), made(FP32, 4, 4)).dtype is FP16


def test_forms_in_place_and_into_out_run_as_given() -> None:
    x, out = made(FP32, 4, 4), torch.empty(4, 4)
    with Autocast():
        assert x.addmm_(x, x).dtype is FP32
        assert torch.mm(x, x, out=out).dtype is FP32
        with pytest.raises(RuntimeError, match="dtype"):
            x.addmm_(x.half(), x)


# CPU autocast's own list of low operations that are low on CUDA too, and what neither lists.
AGREED = (
    "conv1d", "conv2d", "conv3d", "bmm", "mm", "linalg_vecdot", "baddbmm", "addmm", "addbmm", "linear", "matmul",
    "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention",
)  # fmt: skip


@each("name", AGREED)
@each("dtype", [FP16, BF16])
def test_results_equal_those_of_torch_where_its_lists_agree(name: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype=dtype):
        expected = LOW[name](FP32)
    with Autocast(dtype=dtype):
        assert torch.equal(LOW[name](FP32), expected)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean(-1))


def gradients(net: nn.Module, loss: Tensor) -> list[Tensor]:
    net.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def test_gradients_equal_those_of_casts_by_hand_inside_and_after_the_context() -> None:
    net, x, classes = Net(), torch.randn(8, 2, 6), torch.randint(3, (8,))
    h = F.conv1d(x.half(), net.conv.weight.half(), net.conv.bias.half(), padding=1)
    h = torch.relu(F.group_norm(h.float(), 2, net.norm.weight, net.norm.bias)).mean(-1)
    h = F.linear(h.half(), net.head.weight.half(), net.head.bias.half())
    # Inside cross_entropy, log_softmax is called with the dtype of the logits, which stands; nll_loss is high.
    expected = gradients(net, F.nll_loss(torch.log_softmax(h, -1, dtype=FP16).float(), classes))
    with Autocast():
        loss = F.cross_entropy(net(x), classes)
        inside = gradients(net, loss)
        after = F.cross_entropy(net(x), classes)
    assert loss.dtype is FP32
    for got in (inside, gradients(net, after)):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_backward_in_the_context_is_not_cast() -> None:
    seen: list[torch.dtype] = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            seen.append((g @ g).dtype)
            return g

    with Autocast():
        Product.apply(torch.eye(3, requires_grad=True)).trace().backward()
    assert seen == [FP32]


@each("reentrant", [True, False])
@each("inside", [True, False])
def test_checkpoints_recompute_under_the_lists(reentrant: bool, inside: bool) -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)), torch.randn(3, 4, requires_grad=True)
    dtypes: list[torch.dtype] = []

    def part(x: Tensor) -> Tensor:
        dtypes.append((x @ x.T).dtype)
        return net(x)

    with Autocast():
        expected = gradients(net, net(x).float().sum())
        loss = checkpoint(part, x, use_reentrant=reentrant).float().sum()
        if inside:
            got = gradients(net, loss)
    if not inside:
        got = gradients(net, loss)
    assert dtypes == [FP16, FP16]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_checkpointing_is_as_it_was_afterwards() -> None:
    module = torch.utils.checkpoint
    before = getattr(module, frame_entry._GENERATOR), module.CheckpointFunction.forward
    with Autocast(), Autocast():
        assert getattr(module, frame_entry._GENERATOR) is not before[0]
        assert module.CheckpointFunction.forward is not before[1]
    assert (getattr(module, frame_entry._GENERATOR), module.CheckpointFunction.forward) == before


def test_binary_cross_entropy_is_refused_with_advice() -> None:
    x = made(FP32, 4)
    with Autocast():
        with pytest.raises(
            ArgumentError,
            match="expected logits where operations run in torch.float16; .* Use torch.nn.functional.binary_c",
        ):
            F.binary_cross_entropy(x, x)
        assert nn.BCEWithLogitsLoss()(x, x).dtype is FP32
    assert F.binary_cross_entropy(x, x).dtype is FP32
    with (
        Autocast(CUDA.with_banned("exp")),
        pytest.raises(ArgumentError, match=r"exp: expected an operation that the lists do not ban; .*without\('exp'\)"),
    ):
        torch.exp(x)


def test_changed_lists_are_followed() -> None:
    x = made(FP32, 4, 4)
    with Autocast(CUDA.with_high("linear").with_low("gelu").without("softmax")):
        assert F.linear(x.half(), x.half()).dtype is FP32
        assert F.gelu(x).dtype is FP16
        assert torch.softmax(x.half(), -1).dtype is FP16
        assert (x @ x).dtype is FP16


# -- contexts ----------------------------------------------------------------------------------------------------------


def product() -> torch.dtype:
    return (made(FP32, 2, 2) @ made(FP32, 2, 2)).dtype


def test_contexts_nest_and_are_taken_back() -> None:
    context = Autocast()
    with context:
        with Autocast(dtype=BF16):
            assert product() is BF16
            with context:
                assert product() is FP16
            assert product() is BF16
        with Autocast(enabled=False):
            assert product() is FP32
        assert product() is FP16
    assert product() is FP32
    assert not any(thread_frame.current() or key.on for key in (operation_kernels.intercept_some(),))


def test_an_exception_takes_it_back() -> None:
    with pytest.raises(KeyError), Autocast():
        raise KeyError
    assert product() is FP32


def test_a_decorator_works() -> None:
    assert Autocast()(product)() is FP16


def test_it_is_of_one_thread() -> None:
    with Autocast():
        found: list[torch.dtype] = []
        thread = threading.Thread(target=lambda: found.append(product()))
        thread.start()
        thread.join()
    assert found == [FP32]


def test_torch_autocast_off_is_a_region_without_casts_and_on_is_refused() -> None:
    with Autocast():
        with torch.autocast("cpu", enabled=False):
            assert product() is FP32
        with (
            torch.autocast("cpu", dtype=BF16),
            pytest.raises(ArgumentError, match=r"off inside a context .* got torch.autocast\('cpu'\) on"),
        ):
            product()
    with torch.autocast("cpu", dtype=BF16), pytest.raises(ArgumentError, match="off around a context"), Autocast():
        pass


def test_only_16_bit_dtypes_are_taken() -> None:
    with pytest.raises(
        ArgumentError, match=r"expected dtype to be one of torch.float16, torch.bfloat16; got torch.float8_e4m3fn"
    ):
        Autocast(dtype=torch.float8_e4m3fn)


# -- the casts of weights ----------------------------------------------------------------------------------------------


def test_a_weight_is_cast_once_until_it_changes_or_its_gradient_comes() -> None:
    w, x = nn.Parameter(torch.eye(2)), torch.ones(1, 2)
    with Autocast():
        first = (x @ w) @ w
        cache = thread_frame.current().cache
        assert len(cache) == 1
        first.sum().backward()
        assert len(cache) == 0
        before = (x @ w).detach()
        with torch.no_grad():
            w.mul_(3)
        assert torch.equal(x @ w, 3 * before)
        with torch.no_grad():
            assert (x @ w).grad_fn is None
        assert (x @ w).grad_fn is not None
    assert len(cache) == 0
    with Autocast(cache=False):
        x @ w
        assert thread_frame.current().cache is None


def test_the_cache_keeps_no_model_alive() -> None:
    with Autocast():
        net = nn.Linear(2, 2)
        net(torch.ones(1, 2))
        gone = weakref.ref(net.weight)
        del net
        gc.collect()
        assert gone() is None or len(thread_frame.current().cache) > 0
    gc.collect()
    assert gone() is None


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_attention_runs_by_the_lists_in_training_and_in_evaluation(training: bool) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).train(training)
    x = torch.randn(2, 3, 8)
    with Autocast(), torch.set_grad_enabled(training):
        assert model.self_attn(x, x, x)[0].dtype is FP16
        out = model(x)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    assert out.dtype is FP32 and fastpath  # the last norm computes in FP32
    assert not torch.equal(out, model(x))
    torch.testing.assert_close(out, model(x), rtol=1e-2, atol=1e-2)


def test_compiled_code_is_made_anew_for_each_context() -> None:
    torch.compiler.reset()
    w = torch.randn(4, 4, requires_grad=True)
    call = torch.compile(lambda x: torch.softmax(x @ w, -1) + x @ w.T, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 4)
    expected = torch.softmax(x.half() @ w.half(), -1, dtype=FP32) + x.half() @ w.half().T
    assert not torch.equal(call(x), expected)
    with Autocast():
        got = call(x)
        assert torch.equal(got, expected)
        got.sum().backward()
    with Autocast(dtype=BF16):
        assert not torch.equal(call(x), expected)
    assert torch.equal(call(x), torch.softmax(x @ w, -1) + x @ w.T)
    torch.compiler.reset()
