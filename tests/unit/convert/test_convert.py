"""What a converted model is: an ordinary module, called, kept and moved as the original."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import plimsoll as pl
from plimsoll.errors import ArgumentError, StateError, UnsupportedTensorError
from plimsoll.unit.capture.captured_program import capture
from plimsoll.unit.optim.parameter_kinds import traits_of
from tests.support import processes
from tests.support.cases import each
from tests.support.unit.models import GPT, MODELS, DataDependent, MatmulMLP

TOKENS = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(0))
EXAMPLE = {"tokens": TOKENS[:, :-1], "targets": TOKENS[:, 1:]}


def _mlp(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def gpt() -> nn.Module:
    torch.manual_seed(0)
    return pl.unit.convert(GPT(dropout=0.5), EXAMPLE, seed=0)


def test_names_types_and_state_are_the_originals(gpt: nn.Module) -> None:
    original = GPT()
    assert [name for name, _ in gpt.named_modules()] == [name for name, _ in original.named_modules()]
    assert {name: x.shape for name, x in gpt.state_dict().items()} == {
        name: x.shape for name, x in original.state_dict().items()
    }
    assert isinstance(gpt.get_submodule("blocks.1.down"), pl.unit.nn.Linear)
    assert isinstance(gpt.get_submodule("norm"), nn.LayerNorm)
    assert isinstance(gpt.get_submodule("blocks"), nn.ModuleList)
    assert "self.attention(" in gpt.get_submodule("blocks.0").code  # type: ignore[union-attr]


def test_equal_blocks_share_their_code(gpt: nn.Module) -> None:
    model = pl.unit.convert(GPT(), EXAMPLE, residual_tau=0.5)
    assert type(model.get_submodule("blocks.0")) is type(model.get_submodule("blocks.1"))
    weighted = type(gpt.get_submodule("blocks.0")), type(gpt.get_submodule("blocks.1"))
    assert weighted[0] is not weighted[1]  # by the running mean, the second counts less


def test_the_original_is_left_alone() -> None:
    model = _mlp()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    converted = pl.unit.convert(model, torch.randn(4, 8))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert model[1].inplace  # type: ignore[union-attr]
    assert not {x.data_ptr() for x in model.parameters()} & {x.data_ptr() for x in converted.parameters()}


def test_parameters_are_drawn_by_the_seed_and_of_unit_variance() -> None:
    one, two, other = (pl.unit.convert(nn.Linear(256, 256), torch.randn(4, 256), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.weight, two.weight) and not torch.equal(one.weight, other.weight)
    # 65,536 normal values: their standard deviation's own is 1/sqrt(2 * 65536) = 0.0028; five of them
    assert abs(one.weight.std().item() - 1) < 0.014
    assert not one.bias.any()
    numpys = pl.unit.convert(nn.Linear(256, 256), torch.randn(4, 256), seed=np.int64(1))
    assert torch.equal(one.weight, numpys.weight)
    for seed in (1.5, "1", True, 2**64):
        with pytest.raises(ArgumentError, match="convert: expected seed to be an integer from .*; got seed="):
            pl.unit.convert(nn.Linear(2, 2), torch.randn(4, 2), seed=seed)


class Named(nn.Module):
    """Parameters and modules of names that are no Python, or that a converted module has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.ModuleDict({"class": nn.Linear(8, 8), "a b": nn.Linear(8, 8)})
        self.code["class"].kept = nn.Linear(8, 8)
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(8, 8)) for _ in range(2)])
        self.changed = nn.ParameterDict({"lambda": nn.Parameter(torch.ones(8, 8))})
        self.coverage = nn.Parameter(torch.ones(8, 8))
        self.register_buffer("like", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.code.values(), self.code["class"].kept):
            x = module(x)
        for weight in (*self.listed, self.changed["lambda"], self.coverage):
            x = x @ weight
        return x + self.like


def test_modules_and_parameters_may_have_any_name() -> None:
    x = torch.randn(4, 8)
    converted = pl.unit.convert(Named(), x, seed=0).eval()
    assert dict(converted.named_parameters()).keys() == dict(Named().named_parameters()).keys()
    y = converted(x)
    assert 0.2 < y.std() < 5 and torch.equal(pickle.loads(pickle.dumps(converted))(x), y)
    torch.testing.assert_close(pl.unit.fold(converted)(x), y)


@each("name", ["recipe", "signature", "_code", "_coverage", "_draws", "_names", "_seed", "_all_draws", "_kept"])
def test_a_module_or_parameter_may_be_named_like_what_a_converted_model_keeps(name: str) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter(name, nn.Parameter(torch.ones(8, 8)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ getattr(self, name)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, Inner())

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(getattr(self, name)(x))

    x = torch.randn(4, 8)
    converted = pl.unit.convert(Outer(), x, seed=0).eval()
    y = converted(x)
    assert list(converted.state_dict()) == [f"{name}.{name}"] and converted.coverage == []
    converted.reset_parameters()
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), y)
    folded = pl.unit.fold(converted)
    torch.testing.assert_close(folded(x), y)
    assert torch.equal(copy.deepcopy(folded)(x), folded(x)) and isinstance(folded.kept, list)


def test_a_converted_model_trains(gpt: nn.Module) -> None:
    for optimizer in (lambda m: pl.unit.optim.AdamW(m, lr=0.5), lambda m: torch.optim.AdamW(m.parameters(), lr=0.05)):
        model = copy.deepcopy(gpt)
        assert _trained(model, optimizer(model)) < 0.3


def test_it_trains_in_fp16_without_a_loss_scale(gpt: nn.Module) -> None:
    model = copy.deepcopy(gpt)
    with pl.emulate("fp16"):
        assert _trained(model, pl.unit.optim.AdamW(model, lr=0.5)) < 0.3


def _trained(model: nn.Module, optimizer: Any) -> float:
    """The last loss of twenty steps, as a part of the first."""
    torch.manual_seed(0)
    losses: list[float] = []
    for _ in range(20):
        optimizer.zero_grad()
        loss, _ = model(**EXAMPLE)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[-1] / losses[0]


def test_evaluation_is_deterministic_and_training_drops(gpt: nn.Module) -> None:
    gpt.eval()
    one, two = gpt(**EXAMPLE)[1], gpt(**EXAMPLE)[1]
    gpt.train()
    three = gpt(**EXAMPLE)[1]
    assert torch.equal(one, two) and not torch.equal(one, three)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.conv(x)), 0.5, self.training)


def test_running_statistics_are_updated_in_training_only() -> None:
    model = pl.unit.convert(Normed(), torch.randn(4, 3, 8, 8))
    before = model.norm.running_mean.clone()
    model.eval()(torch.randn(4, 3, 8, 8))
    assert torch.equal(model.norm.running_mean, before) and model.norm.num_batches_tracked == 0
    model.train()(torch.randn(4, 3, 8, 8))
    assert not torch.equal(model.norm.running_mean, before) and model.norm.num_batches_tracked == 1


@each("batch", [0, 1, 3, 9])
def test_any_batch(gpt: nn.Module, batch: int) -> None:
    tokens = torch.zeros(batch, 5, dtype=torch.long)
    assert gpt(tokens, tokens)[1].shape == (batch, 5, 64)


def test_pickles_into_a_fresh_process(gpt: nn.Module, tmp_path: Path) -> None:
    gpt.eval()
    torch.save((gpt, EXAMPLE, gpt(**EXAMPLE)[1].detach()), tmp_path / "model.pt")
    gpt.train()
    code = (
        "import sys, torch\n"
        "model, example, expected = torch.load(sys.argv[1], weights_only=False)\n"
        "assert torch.equal(model(**example)[1], expected)\n"
        "import plimsoll as pl\n"
        "assert len(pl.unit.fold(model).kept) == 2\n"
    )
    done = processes.python("-W", "error", "-c", code, tmp_path / "model.pt")
    assert done.returncode == 0, done.stderr


def test_copies_and_state_round_trip(gpt: nn.Module, tmp_path: Path) -> None:
    gpt.eval()
    copied, again = copy.deepcopy(gpt), pl.unit.convert(GPT(), EXAMPLE, seed=9).eval()
    torch.save(gpt.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    expected = gpt(**EXAMPLE)[1]
    assert torch.equal(copied(**EXAMPLE)[1], expected) and torch.equal(again(**EXAMPLE)[1], expected)
    assert type(copied) is type(gpt) and pickle.loads(pickle.dumps(gpt)).coverage == gpt.coverage
    gpt.train()


@each("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(gpt: nn.Module, dtype: torch.dtype) -> None:
    loss, logits = copy.deepcopy(gpt).to(dtype)(**EXAMPLE)
    loss.backward()
    assert logits.dtype is dtype and bool(loss.isfinite())


def test_meta_device() -> None:
    with torch.device("meta"):
        model = GPT()
    made = pl.unit.convert(model, EXAMPLE, seed=0)
    assert all(x.is_meta for x in made.parameters())
    made.to_empty(device="cpu")
    made.reset_parameters()
    expected = pl.unit.convert(GPT(), EXAMPLE, seed=0)
    assert all(torch.equal(x, y) for x, y in zip(made.parameters(), expected.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore")  # what dynamo says of itself is not ours
def test_compiles_whole_and_not_for_every_batch() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    # One block: with open sizes its code alone takes seconds.
    model = pl.unit.convert(GPT(layers=1, dropout=0.5), EXAMPLE, seed=0).eval()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    counts: list[int] = []
    for batch in (4, 3, 7, 5, 9):
        tokens = torch.arange(17 * batch).view(batch, 17) % 64
        example = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        loss, logits = compiled(**example)
        torch.testing.assert_close(logits, model(**example)[1])
        counts.append(counter.frame_count)
    # With dynamic=True torch begins the first compilation again: dropout's probability, a float, may be no symbol.
    assert counts == [2] * 5
    loss.backward()
    assert model.get_submodule("blocks.0.up").weight.grad is not None  # type: ignore[union-attr]
    torch._dynamo.reset()


def test_ties_frozen_parameters_and_kinds() -> None:
    original = GPT(tied=True)
    original.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    made = pl.unit.convert(original, EXAMPLE, seed=0)
    assert made.head.weight is made.tokens.weight
    assert [n for n, x in made.named_parameters() if not x.requires_grad] == ["blocks.0.up.weight"]
    traits = traits_of(made)
    assert set(traits) == {name for name, _ in made.named_parameters()}
    assert traits["tokens.weight"].kind == "embedding" and traits["norm.weight"].kind == "norm"


def test_depth_is_the_number_of_branches_that_join_one_path() -> None:
    """Two blocks of two branches; norms, weights and biases inside of one are deep, all others are not."""
    traits = traits_of(pl.unit.convert(GPT(), EXAMPLE, seed=0))
    assert {name: trait.depth for name, trait in traits.items()} == {
        name: 4 if name.startswith("blocks.") else 1 for name in traits
    }
    norms_behind = MODELS["post_norm"]()  # each norm begins a path again
    made = pl.unit.convert(norms_behind.model, norms_behind.example, seed=0)
    assert {trait.depth for trait in traits_of(made).values()} == {1}


def test_fan_in_of_weights_that_multiply_from_the_right() -> None:
    traits = traits_of(pl.unit.convert(MatmulMLP(), torch.randn(4, 32)))
    assert [traits[name].fan_in for name in "wvu"] == [32, 48, 48]


def test_watch_finds_modules_by_name(gpt: nn.Module, tmp_path: Path) -> None:
    model = copy.deepcopy(gpt)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(**EXAMPLE)[0].backward()
        optimizer.step()
    names = pl.Run(tmp_path / "run").tensors["activations"]
    assert {"blocks.0.up:output", "blocks.1.attention:input"} <= set(names)


def test_fp8_replaces_its_linears(gpt: nn.Module) -> None:
    model = pl.fp8.convert(copy.deepcopy(gpt), scaling="unit")
    assert isinstance(model.get_submodule("blocks.0.down"), pl.fp8.Linear)
    with pytest.raises(StateError, match=r"fold: expected a converted model in its own modules; got .*Fold before"):
        pl.unit.fold(model)


class Shared(nn.Module):
    """A module under two names, one in two containers, one that is called twice, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.b = nn.Sequential(self.a[0], nn.GELU())
        self.inner = nn.ModuleDict({"a": self.a})
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.inner["a"](x)


def test_shared_modules_stay_shared() -> None:
    made = pl.unit.convert(Shared(), torch.randn(4, 8))
    assert made.get_submodule("a.0") is made.get_submodule("b.0") and made.get_submodule("inner.a") is made.a
    assert list(made.state_dict()) == list(Shared().state_dict())
    assert [left.module for left in made.coverage] == ["unused", "unused"]
    made(torch.randn(2, 8)).sum().backward()


class Twice(nn.Module):
    """One module, called in two ways: its code depends on the call."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.mix(x, None) * self.mix(x, y)


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.linear(x) if y is None else torch.tanh(self.linear(x + y))


def test_a_module_whose_calls_differ_has_a_code_for_each() -> None:
    made = pl.unit.convert(Twice(), (torch.randn(4, 8), torch.randn(4, 8)))
    assert "call=1" in made.code and "_call_1" in made.mix.code
    assert copy.deepcopy(made)(torch.ones(2, 8), torch.ones(2, 8)).shape == (2, 8)


class Nested(nn.Module):
    """Nested inputs and outputs, keyword-only arguments, blocks without gradients and without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.m = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, options: Any = None, flag: bool = True) -> Any:
        with torch.no_grad():
            y = self.l(x) * 2
        with torch.autocast("cpu", enabled=False):
            z = self.m(x.float()).sin()
        return {"a": [z + y, (z,)], "b": options["k"], "flag": flag}


def test_nested_inputs_outputs_and_contexts() -> None:
    x, options = torch.randn(3, 4), {"k": torch.randn(3, 2)}
    made = pl.unit.convert(Nested(), {"x": x, "options": options})
    found = pickle.loads(pickle.dumps(made))(x, options=options)
    assert set(found) == {"a", "b", "flag"} and found["flag"] is True and torch.equal(found["b"], options["k"])
    made(x, options=options)["a"][0].sum().backward()
    assert made.l.weight.grad is None and made.m.weight.grad is not None
    with pytest.raises(ArgumentError, match=r"expected options of the example's structure.*got"):
        made(x, options={"j": options["k"]})
    with pytest.raises(ArgumentError, match=r"expected flag=True, as in the example; got False"):
        made(x, options=options, flag=False)


def test_inputs_of_one_memory_are_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.m = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.l(x) * self.m(y)

    x, y, model = torch.randn(4, 8), torch.randn(4, 8), Two()
    shared, apart = pl.unit.convert(model, (x, x), seed=0), pl.unit.convert(model, (x, y), seed=0)
    assert torch.equal(shared(x, y), apart(x, y))


def test_a_hugging_face_output_is_one() -> None:
    case = MODELS["bert"]()
    made = pl.unit.convert(case.model, case.example)
    found = made(**case.example)
    assert type(found).__name__ == "MaskedLMOutput" and found.loss.dim() == 0
    longer = torch.randint(0, 96, (2, 20))
    assert made(input_ids=longer, attention_mask=torch.ones_like(longer), labels=longer).logits.shape == (2, 20, 96)


def test_recurrent_modules_are_left_and_said() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0])

    made = pl.unit.convert(Recurrent(), torch.randn(3, 6, 4))
    assert ("lstm", "no rule for this operation") in {(left.operation, left.why) for left in made.coverage}
    made(torch.randn(5, 6, 4)).sum().backward()
    assert made.lstm.weight_ih_l0.grad is not None


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> None:
        self.linear(x)


@each(
    ("model", "example", "message"),
    [
        (nn.ReLU, torch.ones(2, 8), r"expected a model with parameters; got ReLU"),
        (Nothing, torch.ones(2, 8), r"expected a model that returns a tensor; got Nothing"),
        (lambda: nn.Linear(8, 8), 3, r"expected an example that is a tensor.*got int"),
        (lambda: pl.unit.nn.Linear(8, 8), torch.ones(2, 8), r"expected a model that has no factors yet; got Linear"),
        (DataDependent, torch.ones(2, 8), r"control flow .* in module 'inner.1' at .*models\.py:\d+"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_converted_is_refused(model: Any, example: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=r"(?s)convert: .*" + message):
        pl.unit.convert(model(), example)


def test_converting_twice_is_refused() -> None:
    made = pl.unit.convert(nn.Linear(8, 8), torch.ones(2, 8))
    with pytest.raises(ArgumentError, match=r"expected a model that has no factors yet; got Linear at '0'"):
        pl.unit.convert(nn.Sequential(made), torch.ones(2, 8))


def test_wrong_inputs_are_told(gpt: nn.Module) -> None:
    mlp = pl.unit.convert(_mlp(), torch.randn(4, 8))
    with pytest.raises(ArgumentError, match=r"expected input of sizes \(any, 8\); got \(2, 7\)"):
        mlp(torch.ones(2, 7))
    with pytest.raises(UnsupportedTensorError, match=r"expected input to be floating.*got torch\.int64"):
        mlp(torch.ones(2, 8, dtype=torch.long))
    with pytest.raises(
        UnsupportedTensorError, match=r"expected targets to be a tensor, as in the example; got NoneType"
    ):
        gpt(EXAMPLE["tokens"])
    with pytest.raises(ArgumentError, match=r"expected tokens with at most 16 in dimension 1; got \(2, 40\)"):
        gpt(torch.zeros(2, 40, dtype=torch.long), torch.zeros(2, 40, dtype=torch.long))


def test_in_place_operations_lose_no_factor() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            z = F.relu(y, inplace=True)
            return self.b(y) + z

    made = pl.unit.convert(InPlace(), torch.randn(4, 8), seed=0)
    assert "relu_(" not in made.code and made.code.count("relu") >= 3
    made(torch.randn(4, 8)).sum().backward()


def test_capture_of_a_converted_model_is_possible(gpt: nn.Module) -> None:
    """It exports: what it does is plain torch."""
    torch.export.export(copy.deepcopy(gpt).eval(), (), EXAMPLE, strict=False)
    assert capture(nn.Linear(8, 8), torch.ones(2, 8)).training


class Calling(nn.Module):
    """A block within a model, with a forward of a test."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.shift, self.called = nn.Linear(8, 8), nn.Parameter(torch.zeros(8)), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x)


@each("name", ["add_", "sub_", "mul_"])
def test_what_is_broadcast_into_an_operation_in_place_has_the_factors_of_the_other_form(name: str) -> None:
    x, found = torch.randn(4, 8), []
    for method in (name, name.removesuffix("_")):
        model = nn.Sequential(Calling(lambda block, x, m=method: getattr(block.linear(x), m)(block.shift)))
        converted = pl.unit.convert(model, x, seed=0)
        with torch.no_grad():
            converted.get_parameter("0.shift").copy_(torch.linspace(0.5, 2, 8))
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        y = converted(batch)
        y.square().sum().backward()
        found.append((y.detach(), *(p.grad for p in converted.parameters())))
    for in_place, other in zip(*found, strict=True):
        torch.testing.assert_close(in_place, other)


def test_a_constant_of_a_module_within_is_kept() -> None:
    def forward(block: nn.Module, x: Tensor) -> Tensor:
        return torch.where(x > 0, block.linear(x), torch.tensor(2.0))

    model = nn.Sequential(nn.Sequential(Calling(forward)), nn.Linear(8, 3))
    converted, called = pl.unit.convert(model, torch.randn(4, 8), seed=0).eval(), []
    x = torch.randn(6, 8)
    handle = converted.get_submodule("0.0").register_forward_hook(lambda _module, _inputs, y: called.append(y))
    y = converted(x)
    handle.remove()
    assert torch.equal(called[0][x <= 0], torch.full_like(x[x <= 0], 2.0)) and not (called[0][x > 0] == 2).any()
    assert list(converted.state_dict()) == list(model.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(converted))(x), y)
    torch.testing.assert_close(pl.unit.fold(converted)(x), y)


def test_a_size_that_depends_on_values_is_refused() -> None:
    model = nn.Sequential(Calling(lambda block, x: block.linear(x)[x[:, 0] > 0]))
    with pytest.raises(
        ArgumentError, match=r"convert: expected sizes that follow from .*; got `.*`, whose result's size"
    ):
        pl.unit.convert(model, torch.randn(4, 8))
