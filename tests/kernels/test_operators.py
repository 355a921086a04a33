"""The operator family: schemas, fakes, mutation, graphs; and the choice of a backend."""

import os

import pytest
import torch

from plimsoll import kernels
from plimsoll.errors import ArgumentError, BackendError
from plimsoll.formats import E4M3, MXFP4, NVFP4
from plimsoll.kernels import backend as _backend
from plimsoll.kernels.operators.cast_spec import NEAREST_EVEN, STOCHASTIC, BlockSpec, CastSpec
from plimsoll.watch.taps import compiled_taps  # noqa: F401  (defines `keep_`)
from tests.support import processes
from tests.support.cases import each

ELEMENT = list(CastSpec.of(E4M3, NEAREST_EVEN, saturate=True))
NOISY = list(CastSpec.of(E4M3, STOCHASTIC, saturate=True))
BLOCK = BlockSpec.of(MXFP4, NEAREST_EVEN, 0).to_ints()
TWO_LEVEL = BlockSpec.of(NVFP4, NEAREST_EVEN, 0).to_ints()
OPS = torch.ops.plimsoll


def calls() -> dict[str, tuple[object, tuple[object, ...]]]:
    x, key = torch.randn(6, 40), torch.tensor(5)
    tail = (1.0, None, 0, None)
    return {
        "measure_": (OPS.measure_, ([x, x[0]], kernels.new_bank(3), [2, 0], True, 0)),
        "measure_ blocks": (OPS.measure_, ([x], kernels.new_bank(1, 16), [0], False, 16)),
        "count_nonfinite_": (OPS.count_nonfinite_, ([x, x[0].bfloat16()], kernels.new_counts(3), 1)),
        "update_": (OPS.update_, ([x, x], [x + 1, x], [x, x[:0]], kernels.new_bank(3), [2, 0], kernels.new_moves(3))),
        "unscale_": (OPS.unscale_, ([x, x[0].half()], torch.tensor(0.5), torch.zeros(1), None, [])),
        "unscale_ bank": (OPS.unscale_, ([x], torch.ones(1), torch.zeros(()), kernels.new_bank(3), [2])),
        "absmax": (OPS.absmax, (x,)),
        "cast": (OPS.cast, (x, ELEMENT, *tail, torch.float32)),
        "cast other carrier": (OPS.cast, (x.bfloat16(), ELEMENT, *tail, torch.float64)),
        "cast with key and scale": (OPS.cast, (x, NOISY, 1.0, torch.tensor(3.0).double(), 0, key, torch.float32)),
        "cast_out": (OPS.cast_out, (x, ELEMENT, *tail, torch.empty_like(x))),
        "block_cast": (OPS.block_cast, (x, BLOCK, None, *tail, torch.float16)),
        "block_cast_out": (OPS.block_cast_out, (x, BLOCK, None, *tail, torch.empty_like(x))),
        "pack": (OPS.pack, (x, ELEMENT, *tail)),
        "block_pack": (OPS.block_pack, (x, TWO_LEVEL, torch.tensor(0.001), *tail)),
        "fp8_cast": (OPS.fp8_cast, (x, torch.float8_e4m3fn, 1.0, None, 2, kernels.new_bank(2), 1)),
        "keep": (OPS.keep, (x,)),
        "keep_": (OPS.keep_, (x, kernels.new_bank(1), -1, 0, False)),
    }


def test_every_operator_is_called_here():
    names = {name.removeprefix("plimsoll::") for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("plimsoll::")}  # fmt: skip
    assert names == {operator.__name__ for operator, _ in calls().values()}


@each("name", calls())
def test_schema_fake_and_autograd(name):
    operator, arguments = calls()[name]
    torch.library.opcheck(operator, arguments)  # raises where a check fails


def requiring(argument):
    """The argument, its floating-point tensors requiring gradients."""
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.clone().requires_grad_() if x.is_floating_point() else x, argument
    )


@each("backend", ["torch", "numba"])
@each("name", calls())
def test_nothing_carries_a_gradient(name, backend):
    operator, arguments = calls()[name]
    arguments = requiring(arguments)
    with kernels.use(backend):
        torch.library.opcheck(operator, arguments, test_utils=("test_autograd_registration",))
        results = operator(*arguments)
    found = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, torch.Tensor)]
    given = [x for x in torch.utils._pytree.tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    assert not any(x.requires_grad for x in found)
    assert all(x.grad_fn is None for x in given)  # what is written to


def test_only_the_named_arguments_are_mutated():
    mutated = {
        "measure_": ["bank"], "count_nonfinite_": ["counts"], "update_": ["bank", "moves"],
        "unscale_": ["gradients", "found_inf", "bank"], "cast_out": ["out"], "block_cast_out": ["out"],
        "keep_": ["bank"],
    }  # fmt: skip
    for name, expected in mutated.items():
        schema = getattr(OPS, name).default._schema
        assert [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] == expected


def test_a_watched_function_compiles_without_a_break_and_counts_the_same():
    def step(x, bank):
        y = torch.relu(x) * 3
        kernels.measure_into([x, y], bank, [0, 2])
        return y.sum() + OPS.cast(y, ELEMENT, 1.0, None, 0, None, torch.float32).mean()

    x = torch.randn(50, 33)
    eager, compiled = kernels.new_bank(3), kernels.new_bank(3)
    expected = step(x, eager)
    address = compiled.data_ptr()
    found = torch.compile(step, fullgraph=True)(x, compiled)
    torch.testing.assert_close(found, expected)
    assert compiled.data_ptr() == address
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_what_watching_does_in_a_step_compiles_without_a_break_and_counts_the_same():
    def step(weight, gradient, bank, moves, counts):
        old = weight.clone()
        weight.sub_(gradient * 0.125)
        kernels.measure_one(gradient, bank, 0)
        kernels.count_nonfinite_into([gradient, old], counts, 1)
        kernels.update_into([old], [weight], [gradient], bank, [1], moves)
        return weight.sum()

    def state():
        gradient = torch.randint(-2, 3, (20, 30)).float()
        gradient[0, 0] = torch.nan
        return torch.ones(20, 30), gradient, kernels.new_bank(2) + 3, kernels.new_moves(2) + 3, kernels.new_counts(2)

    torch.manual_seed(1)
    eager = state()
    torch.manual_seed(1)
    compiled = state()
    step(*eager)
    torch.compile(step, fullgraph=True)(*compiled)
    for found, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert eager[4].tolist() == [0, 1] and eager[3][1, 0] == torch.count_nonzero(eager[1])


def test_unscaling_compiles_without_a_break_and_does_the_same():
    def step(weight, gradient, inverse, found, bank):
        gradient.mul_(3)
        kernels.unscale_into([gradient, weight], inverse, found, bank, [1, 0])
        kernels.unscale_into([gradient], inverse, found)
        return gradient.sum() - weight.sum()

    def state(value):
        gradient = torch.linspace(-5, 5, 600).reshape(20, 30)
        gradient[3, 4] = value
        return torch.ones(7), gradient, torch.tensor(0.3), torch.zeros(1), kernels.new_bank(2) + 3

    compiled = torch.compile(step, fullgraph=True)
    for value in (1.0, torch.inf):
        eager, other = state(value), state(value)
        address = other[1].data_ptr()
        torch.testing.assert_close(compiled(*other), step(*eager), equal_nan=True)
        assert other[1].data_ptr() == address and float(other[3]) == (value == torch.inf)
        for found, expected in zip(other, eager, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_fake_tensors_go_through_the_operators():
    with torch._subclasses.FakeTensorMode():
        x, bank, counts = torch.ones(5), kernels.new_bank(2), kernels.new_counts(2)
        # One without an implementation for fake tensors raises an error, or looks for the memory that they do not have.
        kernels.measure_one(x, bank, 1)
        kernels.count_nonfinite_into([x], counts, 1)
        kernels.unscale_into([x], torch.ones(1), torch.zeros(1), kernels.new_bank(1), [0])
        assert all(type(each) is torch._subclasses.FakeTensor for each in (x, bank, counts))


def test_a_compiled_training_step_counts_both_directions():
    class Tap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, bank):
            ctx.bank = bank
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            kernels.measure_into([gradient], ctx.bank, [0])
            return gradient, None

    def step(x, weight, forward_bank, backward_bank):
        hidden = x @ weight
        kernels.measure_into([hidden], forward_bank, [0])
        return Tap.apply(hidden, backward_bank).square().mean()

    x, weight = torch.randn(8, 5), torch.randn(5, 4, requires_grad=True)
    banks = [kernels.new_bank(1) for _ in range(4)]
    step(x, weight, *banks[:2]).backward()
    expected = weight.grad.clone()
    weight.grad = None
    torch.compile(step, fullgraph=True)(x, weight, *banks[2:]).backward()
    torch.testing.assert_close(weight.grad, expected)
    assert torch.equal(banks[0][:, :8], banks[2][:, :8]) and torch.equal(banks[1][:, :8], banks[3][:, :8])
    assert int(banks[3][0, 0]) == 32


def test_backend_is_automatic_forced_and_refused(monkeypatch):
    x = torch.randn(3)
    assert _backend.choose(x).__name__.endswith(".numba_backend")
    assert _backend.choose(torch.empty(3, device="meta")).__name__.endswith(".torch_backend")
    with kernels.use("torch"):
        assert _backend.choose(x).__name__.endswith(".torch_backend")
        assert kernels.forced() == "torch"
    with kernels.use("numba"), pytest.raises(BackendError, match="for the forced backend 'numba'; got one on meta"):
        _backend.choose(torch.empty(3, device="meta"))
    monkeypatch.setenv("PLIMSOLL_BACKEND", "torch")
    assert _backend.choose(x).__name__.endswith(".torch_backend")
    monkeypatch.setenv("PLIMSOLL_BACKEND", "cuda")
    with pytest.raises(ArgumentError, match="PLIMSOLL_BACKEND: expected one of torch, numba, triton; got 'cuda'"):
        _backend.choose(x)
    with pytest.raises(ArgumentError, match="expected one of torch, numba, triton; got 'fast'"), kernels.use("fast"):
        pass


MISSING = """
import sys, warnings
sys.modules["numba"] = None
import torch, plimsoll
from plimsoll import kernels
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for _ in range(3):
        assert plimsoll.measure(torch.ones(4)).count == 4
        assert float(plimsoll.cast(torch.tensor(0.1), "e4m3")) == 0.1015625
messages = [str(w.message) for w in said if w.category is RuntimeWarning]
assert len(messages) == 1 and "the numba backend is not available" in messages[0], messages
try:
    with kernels.use("numba"):
        pass
except plimsoll.BackendError as error:
    print(error)
"""

UNWRITABLE = """
import warnings
from numba.core import caching
caching.CacheImpl._locator_classes = []  # as on a read-only system without a home
import torch
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from plimsoll import kernels
    counts = kernels.new_counts(1)
    kernels.count_nonfinite_into([torch.tensor([1.0, torch.inf])], counts, 0)  # of all kernels it compiles the fastest
    assert counts.sum() == 1
    from plimsoll.kernels import numba_backend
messages = [str(w.message) for w in said if "writable cache folder" in str(w.message)]
assert len(messages) == 1, messages
assert numba_backend.cache_folder() is None
print(numba_backend.describe())
"""

READ_ONLY = """
from numba.core import caching
def refuse(self):
    raise OSError("read-only file system")
caching.InTreeCacheLocator.ensure_cache_path = refuse
import torch
from plimsoll import kernels
from plimsoll.kernels import numba_backend
kernels.count_nonfinite_into([torch.ones(4)], kernels.new_counts(1), 0)
print(numba_backend.cache_folder())
"""


def run(code: str, **environment: str) -> str:
    done = processes.python("-c", code, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_missing_backend_is_said_once_and_refused_by_name():
    assert "expected a backend that runs here; got 'numba'" in run(MISSING)


def test_without_a_place_for_compiled_code_it_is_said_once_and_works():
    assert "memory only" in run(UNWRITABLE)


def test_a_read_only_install_caches_elsewhere(tmp_path):
    folder = run(READ_ONLY, XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path)).strip()
    assert folder.startswith(str(tmp_path)) and any(tmp_path.rglob("*.nbi"))


def test_compiled_code_of_other_sources_is_not_used(monkeypatch):
    """A kernel holds constants of other files, as of the row layout: a change there must compile it again."""
    measuring = pytest.importorskip("plimsoll.kernels.numba_backend.measuring.kernels", reason="needs Numba")
    kernels.measure_one(torch.ones(4, dtype=torch.float64), kernels.new_bank(1), 0)
    index = measuring.measure_float64._cache._cache_file
    assert {name for name, *_ in index._source_stamp} >= {"row_layout.py", "sweep.py", "compiling.py"}
    before = index._source_stamp
    monkeypatch.setattr(index, "_source_stamp", (("row_layout.py", 1, 1), *before[1:]))
    assert index._load_index() == {}


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: synchronisation and graphs exist only there"
)
def test_on_cuda_nothing_synchronises_and_graphs_capture():
    x, bank = torch.randn(1000, device="cuda"), kernels.new_bank(2, device="cuda")
    moves, counts = kernels.new_moves(2, device="cuda"), kernels.new_counts(1, device="cuda")
    y, inverse, found = torch.ones(50, device="cuda"), torch.ones(1, device="cuda"), torch.zeros(1, device="cuda")

    def watched_step():
        kernels.measure_one(x, bank, 0)
        kernels.count_nonfinite_into([x, x[1:]], counts, 0)
        kernels.update_into([x, x], [x + 1, x], [x, x], bank, [0, 1], moves)
        kernels.unscale_into([x, y], inverse, found, bank, [0, 1])
        kernels.unscale_into([x], inverse, found)

    kernels.measure_into([x, x], bank, [0, 1])
    watched_step()
    torch.cuda.set_sync_debug_mode("error")  # torch raises where the host would wait
    try:
        kernels.measure_into([x, x], bank, [0, 1])
        watched_step()
        OPS.cast(x, NOISY, 1.0, None, 0, torch.zeros((), dtype=torch.int64, device="cuda"), torch.float32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bank.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.measure_into([x, x], bank, [0, 1])
    graph.replay()
    graph.replay()
    assert bank[:, 0].tolist() == [2000, 2000]
    graph, inverse = torch.cuda.CUDAGraph(), inverse / 2
    with torch.cuda.graph(graph):
        kernels.unscale_into([x, y], inverse, found, bank, [0, 1])
    graph.replay()
    graph.replay()
    assert bank[:, 0].tolist() == [1000, 50] and y.tolist() == [0.25] * 50 and found.item() == 0
    assert moves[:, :2].tolist() == [[1000, 0], [1000, 1000]] and counts.tolist() == [0]
