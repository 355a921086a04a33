"""emulate("fp16"), emulate("bf16"): FP32 sums rounded once, forward and backward, whenever the backward runs."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.errors import ArgumentError, FormatError
from tests.support.cases import each
from tests.support.emulate.calls import LOW, NO_CPU_KERNEL, made

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
DTYPES = {"fp16": FP16, "bf16": BF16}

# Made of several operations that each round (the others are one product), or no product at all.
SEVERAL = {
    "chain_matmul", "gru", "gru_cell", "linalg_multi_dot", "linalg_vecdot", "lstm", "lstm_cell", "prelu", "rnn_relu",
    "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell",
}  # fmt: skip


@each("precision", DTYPES)
@each("name", sorted(set(LOW) - SEVERAL - NO_CPU_KERNEL))
def test_a_product_is_the_fp32_product_rounded_once(name: str, precision: str) -> None:
    dtype, call = DTYPES[precision], LOW[name]
    with pl.emulate(precision) as e:
        got = call(dtype)
    assert sum(e.operations.emulated.values()) == 1 and not e.operations.native
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(call.__globals__, "made", lambda _, *shape: made(dtype, *shape).float())
        expected = call(dtype)
    assert got.dtype is dtype and torch.equal(got, expected.to(dtype))


def half_ulp(y: Tensor, dtype: torch.dtype) -> Tensor:
    info = torch.finfo(dtype)
    return (y.abs().clamp_min(info.smallest_normal) * info.eps).clamp_min(info.smallest_normal * info.eps) / 2


@each("precision", DTYPES)
@each("depth", [1, 7, 500, 4000])
def test_a_product_and_its_gradients_are_within_one_rounding_of_the_exact_ones(precision: str, depth: int) -> None:
    dtype = DTYPES[precision]
    a = torch.randn(9, depth).to(dtype).requires_grad_()
    b = torch.randn(depth, 5).to(dtype).requires_grad_()
    g = torch.randn(9, 5).to(dtype)
    with pl.emulate(precision):
        y = a @ b
    y.backward(g)
    wa, wb, wg = a.detach().double(), b.detach().double(), g.double()
    for got, x, z in ((y.detach(), wa, wb), (a.grad, wg, wb.T), (b.grad, wa.T, wg)):
        exact = x @ z
        # FP32 sums of n terms err by at most n * 2^-24 of the sum of magnitudes, then comes one rounding.
        sums = x.shape[1] * 2.0**-24 * (x.abs() @ z.abs())
        assert got is not None and bool(
            ((got.double() - exact).abs() <= half_ulp(exact, dtype) * (1 + 1e-6) + 2 * sums).all()
        )


def test_ties_subnormals_overflow_and_nan() -> None:
    one = torch.ones(1, 1, dtype=FP16)
    with pl.emulate("fp16", lists=None):

        def product(x: float, y: float) -> float:
            return (one * x @ (one * y)).item()

        assert product(60000, 2) == torch.inf and product(-60000, 2) == -torch.inf
        assert product(2.0**-14, 2.0**-10) == 2.0**-24 and product(2.0**-14, 2.0**-11) == 0.0
        assert product(2.0**-14, 2.0**-10 * 1.5) == 2.0**-23  # a tie to even
        assert torch.tensor(product(torch.inf, 0.0)).isnan()
        a, b = torch.tensor([[60000.0, 60000.0]], dtype=FP16), torch.tensor([[2.0], [-2.0]], dtype=FP16)
        assert (a @ b).item() == 0.0  # what overflows on the way does not overflow FP32 sums


def test_the_backward_of_every_product_is_its_fp32_backward_rounded_once() -> None:
    def run(dtype: torch.dtype, double: bool) -> list[Tensor]:
        torch.manual_seed(0)
        shapes = {"x": (2, 4, 6), "w": (4, 4, 3), "m": (6, 5), "q": (2, 3, 6, 4), "s": (1, 2, 5, 5), "k": (3, 2, 3, 3)}
        values = {n: torch.randn(shape).to(FP16).to(dtype).requires_grad_() for n, shape in shapes.items()}
        v = values
        outs = [
            F.conv1d(v["x"], v["w"], padding=1), v["x"] @ v["m"], torch.bmm(v["x"], v["x"].mT),
            F.scaled_dot_product_attention(v["q"], v["q"], v["q"]), F.conv2d(v["s"], v["k"], v["k"][:, 0, 0, 0]),
            F.conv_transpose2d(v["s"], v["k"].transpose(0, 1)), F.linear(v["m"], v["m"], v["m"][:, 0]),
            torch.einsum("bij,jk->bik", v["x"], v["m"]), torch.baddbmm(v["x"][:, :, :4], v["x"], v["x"].mT),
        ]  # fmt: skip
        grads = []
        for y in outs:
            inputs = [one for one in values.values() if one.requires_grad]
            g = torch.linspace(-1, 1, y.numel()).view_as(y).to(FP16).to(dtype)
            grads += [one for one in torch.autograd.grad(y, inputs, g, allow_unused=True) if one is not None]
        return [*outs, *grads]

    with pl.emulate("fp16", lists=None):
        got = run(FP16, False)
    expected = run(FP32, False)
    differing = [index for index, (a, b) in enumerate(zip(got, expected, strict=True)) if not torch.equal(a, b.half())]
    # Five of the nine calls take one input twice: there each gradient is rounded before the two are added.
    assert all(torch.allclose(got[i].float(), expected[i], rtol=2e-3, atol=2e-3) for i in differing)
    assert len(differing) == 5


def test_forms_in_place_and_into_out() -> None:
    a, b, c = (torch.randn(4, 4).half() for _ in range(3))
    expected = torch.addmm(c.float(), a.float(), b.float(), beta=0.5).half()
    with pl.emulate("fp16", lists=None) as e:
        d = c.clone()
        assert d.addmm_(a, b, beta=0.5) is d and torch.equal(d, expected)
        out = torch.empty(4, 4, dtype=FP16)
        assert torch.addmm(c, a, b, beta=0.5, out=out) is out and torch.equal(out, expected)
        assert torch.equal(torch.mm(a, b, out=torch.empty(0, dtype=FP16)), (a.float() @ b.float()).half())
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(a, b.float())
    assert e.operations.emulated == {"addmm_": 1, "addmm": 1, "mm": 1}


def test_a_second_derivative_is_right() -> None:
    x = torch.tensor([[1.5]], dtype=FP16, requires_grad=True)
    with pl.emulate("fp16", lists=None):
        (first,) = torch.autograd.grad(x @ x @ x, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (6.75, 9.0)


def test_an_embedding_sums_its_gradient_in_fp32() -> None:
    table = torch.randn(3, 4).half().requires_grad_()
    rows = torch.tensor([1] * 3000 + [2, 0])
    with pl.emulate("fp16", lists=None) as e:
        y = F.embedding(rows, table, padding_idx=0)
        (y * 1.0).sum().backward()
    assert e.operations.emulated["embedding"] == 1
    assert table.grad is not None and table.grad[:, 0].tolist() == [0.0, 3000.0, 1.0]  # FP16 alone stops at 2048
    with pl.emulate("fp16", lists=None):
        assert F.embedding(rows[:2], table.detach(), max_norm=1.0).dtype is FP16
        F.embedding(rows, sparse := torch.randn(3, 4).half().requires_grad_(), sparse=True).sum().backward()
    assert sparse.grad is not None and sparse.grad.is_sparse


@pytest.mark.parametrize("statistics", [FP16, FP32])
def test_batch_norm_computes_in_fp32_and_keeps_its_statistics(statistics: torch.dtype) -> None:
    x = (torch.randn(64, 3, 5) + 100).half().requires_grad_()
    mean, var = torch.zeros(3, dtype=statistics), torch.ones(3, dtype=statistics)
    wide_mean, wide_var = mean.float(), var.float()
    with pl.emulate("fp16", lists=None):
        y = F.batch_norm(x, mean, var, training=True)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).half())
    wide = x.detach().float().requires_grad_()
    z = F.batch_norm(wide, wide_mean, wide_var, training=True)
    z.backward(torch.linspace(-1, 1, y.numel()).view_as(y).half().float())
    assert torch.equal(y, z.half()) and torch.equal(mean, wide_mean.to(statistics))
    assert torch.equal(var, wide_var.to(statistics)) and torch.equal(x.grad, wide.grad.half())


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.GroupNorm])
def test_norms_of_16_bit_models_compute_in_fp32(kind: Any) -> None:
    norm = (kind(8) if kind is nn.LayerNorm else kind(2, 8)).half()
    x = (torch.randn(6, 8) + 30).half().requires_grad_()
    with pl.emulate("fp16", lists=None) as e:
        y = norm(x)
    y.sum().backward()
    assert sum(e.operations.emulated.values()) == 1
    wide = x.detach().float().requires_grad_()
    z = norm.float()(wide)
    z.sum().backward()
    assert torch.equal(y, z.half()) and torch.equal(x.grad, wide.grad.half())


@each("kind", [nn.LSTM, nn.GRU, nn.RNN])
@each("packed", [True, False])
@each("settings", [{}, {"bidirectional": True, "num_layers": 2}, {"bias": False, "batch_first": True}])
def test_recurrent_layers_are_made_of_rounded_products(kind: Any, packed: bool, settings: dict[str, Any]) -> None:
    layer = kind(4, 5, **settings)
    x = torch.randn(3, 3, 4)
    first = (
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1]), batch_first=layer.batch_first) if packed else x
    )

    def run() -> list[Tensor]:
        layer.zero_grad()
        y, state = layer(first)
        y = y.data if packed else y
        y.float().pow(2).sum().backward()
        return [y, *(state if isinstance(state, tuple) else (state,)), *(p.grad.clone() for p in layer.parameters())]

    expected = run()
    with pl.emulate("fp16") as e:
        got = run()
    assert e.operations.emulated["linear"] >= 3 and got[0].dtype is FP16
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and not torch.equal(a.float(), b)
        torch.testing.assert_close(a.float(), b, rtol=3e-2, atol=3e-2)
    # The same composition in FP64 sums is the layer itself: the order of gates, steps and directions is right.
    with pl.emulate(accumulate="fp64"):
        same = run()
    for a, b in zip(same, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- when the backward runs --------------------------------------------------------------------------------------------


class Small(nn.Module):
    """An attention, a convolution, norms, an embedding: what models are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(16, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.norm(self.conv(self.embed(x).mT)).mT))


def step(model: nn.Module, x: Tensor, where: str = "inside", reentrant: bool | None = None) -> list[Tensor]:
    model.zero_grad()

    def forward(x: Tensor) -> Tensor:
        return model(x).float()

    with pl.emulate("fp16"):
        y = (
            forward(x)
            if reentrant is None
            else checkpoint(lambda _: forward(x), torch.ones(1, requires_grad=True), use_reentrant=reentrant)
        )
        loss = F.cross_entropy(y.flatten(0, 1), x.flatten())
        if where == "inside":
            loss.backward()
    if where == "after":
        loss.backward()
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@each("half", [True, False])
@each(("where", "reentrant"), [("after", None), ("inside", False), ("after", False), ("inside", True), ("after", True)])
def test_a_backward_is_the_same_whenever_it_runs(half: bool, where: str, reentrant: bool | None) -> None:
    model, x = Small().eval(), torch.randint(16, (4, 6))
    model = model.half() if half else model
    expected = step(model, x)
    got = step(model, x, where, reentrant)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(step(model, x), expected, strict=True))  # deterministic


def test_it_is_close_to_fp32_and_rounds() -> None:
    model, x = Small(), torch.randint(16, (4, 6))
    emulated = step(model, x)
    model.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    torch.testing.assert_close(emulated[0], loss, rtol=1e-2, atol=1e-2)
    assert not torch.equal(emulated[0], loss)


@pytest.mark.parametrize("half", [True, False])
def test_training_with_a_scaler_learns_and_skips_what_overflows(half: bool) -> None:
    torch.manual_seed(1)
    model = Small().half() if half else Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    x, losses, scales = torch.randint(16, (8, 6)), [], []
    for _ in range(60):
        optimizer.zero_grad()
        with pl.emulate("fp16"):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
        scaler.scale(loss).backward()
        if half:  # GradScaler refuses FP16 gradients: the sums of the method, by hand
            found = any(not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
            if not found:
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad / scaler.get_scale()
                optimizer.step()
            scaler.update(scaler.get_scale() * (0.5 if found else 1.0))
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    assert losses[-1] < 0.3 * losses[0]
    assert scales[0] == 2.0**39 and scales[-1] < 2.0**30  # overflow was met, and left


def test_small_gradients_vanish_without_a_scale() -> None:
    w, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    for scale, expected in ((1.0, 0.0), (1024.0, 2.0**-24)):  # each of two terms is 2^-25, which FP16 rounds to 0
        w.grad = None
        with pl.emulate("fp16"):
            loss = (x @ w).float().sum() * 2.0**-25
        (loss * scale).backward()
        assert w.grad is not None and w.grad[0, 0].item() / scale == expected


# -- what ran ----------------------------------------------------------------------------------------------------------


def test_operations_say_what_ran_and_how() -> None:
    a = torch.randn(4, 4).half().requires_grad_()
    with pl.emulate("fp16", lists=None) as outer:
        y = torch.relu(a @ a)
        with pl.emulate("fp16", lists=None) as inner:
            torch.tanh(y.view(2, 8).detach()).clone()
        assert outer.operations.native == {"relu": 1}
    y.sum().backward()
    assert outer.operations.emulated == {"matmul": 1} and outer.operations.native == {"relu": 1}
    assert inner.operations.emulated == {} and inner.operations.native == {"tanh": 1}
    with outer:
        torch.ones(2, 2, dtype=FP16) @ torch.ones(2, 2, dtype=FP16)
        (torch.ones(2, 2) * torch.ones(2, 2)).abs()
    assert outer.operations.emulated == {"matmul": 2} and outer.operations.native == {"relu": 1}
    assert str(outer.operations).splitlines() == [
        "matmul        2 emulated",
        "relu          1 native",
    ]


def test_a_backward_inside_is_counted_too() -> None:
    a = torch.randn(4, 4).half().requires_grad_()
    with pl.emulate("fp16", lists=None) as e:
        torch.tanh(a).sum().backward()
    assert e.operations.native["tanh_backward"] == 1


def test_a_graph_from_outside_has_its_products_emulated_in_a_backward_inside() -> None:
    a, b = torch.randn(8, 300).half().requires_grad_(), torch.randn(300, 4).half()
    y = a @ b
    g = torch.randn(8, 4).half()
    with pl.emulate("fp16") as e:
        y.backward(g)
    assert e.operations.emulated == {"mm": 1} and torch.equal(a.grad, (g.float() @ b.float().T).half())


# -- contexts ----------------------------------------------------------------------------------------------------------


def product() -> torch.dtype:
    return (made(FP32, 2, 2) @ made(FP32, 2, 2)).dtype


def test_contexts_nest_decorate_end_with_exceptions_and_hold_for_one_thread() -> None:
    found: list[torch.dtype] = []
    with pl.emulate("fp16"):
        with pl.emulate("bf16"):
            assert product() is BF16
        with pl.emulate("fp32"):
            assert product() is FP32
        assert product() is FP16
        thread = threading.Thread(target=lambda: found.append(product()))
        thread.start()
        thread.join()
    with pytest.raises(KeyError), pl.emulate("fp16"):
        raise KeyError
    e = pl.emulate("fp16")
    with e, e:
        assert product() is FP16
    assert found == [FP32] and product() is FP32 and thread_frame.current() is None
    assert pl.emulate("bf16")(product)() is BF16 and product() is FP32


def test_wrapped_numbers_and_parameters_are_as_outside() -> None:
    with pl.emulate("fp16"):
        assert (torch.ones((), dtype=FP16) * 2.5).dtype is FP16
        assert (torch.ones(2, dtype=torch.int64) / 2).dtype is FP32
        x = torch.ones(2, dtype=torch.int64)
        assert x.add_(1).tolist() == [2, 2] and (2**x).tolist() == [4, 4]
        assert isinstance(nn.Parameter(torch.ones(2)), nn.Parameter) and nn.Linear(2, 2).weight.requires_grad
        assert torch.tensor(1.0, dtype=FP16).item() == 1.0 and torch.arange(3, dtype=FP16).tolist() == [0, 1, 2]


def test_code_compiled_before_runs_eagerly_inside() -> None:
    torch.compiler.reset()
    call = torch.compile(lambda x: torch.relu(x @ x), backend="aot_eager")
    x = torch.randn(4, 4)
    assert call(x).dtype is FP32
    with pl.emulate("fp16") as e:
        assert call(x).dtype is FP16
    assert e.operations.emulated == {"matmul": 1} and e.operations.native == {"relu": 1}
    assert call(x).dtype is FP32
    torch.compiler.reset()


def test_compiling_where_nothing_keeps_it_from_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    torch.compiler.reset()
    call = torch.compile(lambda x: x @ x, backend="aot_eager")
    loaded = sys.modules.pop("torch._dynamo")
    try:
        context = pl.emulate("fp16").__enter__()
    finally:
        sys.modules["torch._dynamo"] = loaded
    try:
        with pytest.raises(Exception, match="emulate: expected code that runs eagerly inside the context"):
            call(torch.randn(2, 2))
    finally:
        context.__exit__(None, None, None)
    torch.compiler.reset()


def test_torch_func_works() -> None:
    x = torch.randn(3, 3)
    expected = torch.autograd.functional.jacobian(lambda a: (a @ a).sum(), x)
    with pl.emulate("fp16"):
        got = torch.func.grad(lambda a: (a @ a).float().sum())(x)
        assert torch.func.vmap(lambda a: a @ a)(torch.randn(2, 3, 3)).dtype is FP16
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@each(
    ("call", "message"),
    [
        (pl.emulate, r"emulate: expected a precision, a format or an accumulator; got none. Write emulate\('fp16'\)"),
        (lambda: pl.emulate("e4m3"), r"expected precision to be one of fp32, fp16, bf16; got 'e4m3'. .*forward='e4m3'"),
        (lambda: pl.emulate("fp32", lists=None), r"expected lists with precision 'fp16' or .* got precision='fp32'"),
        (lambda: pl.emulate(forward="e4m3", lists=None), r"expected lists with precision .* got precision=None"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FormatError, match="e4m33|fp17"):
        pl.emulate("fp17")
