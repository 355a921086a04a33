import math
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision.workarounds import Clamped, clamp_residuals
from tests.support.cases import each

FP16_MAX = 65504.0


class Block(nn.Module):
    """A residual block whose branch adds a constant."""

    def __init__(self, add: float) -> None:
        super().__init__()
        self.add = nn.Parameter(torch.tensor(add))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.add.to(x.dtype)


def stream(layers: int = 4, add: float = 30_000.0) -> nn.Sequential:
    return nn.Sequential(*[Block(add) for _ in range(layers)])


@each("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_what_adds_up_past_the_largest_value_is_brought_back(dtype: torch.dtype) -> None:
    model, x = stream(), torch.tensor([1.0, -90_000.0], dtype=torch.float32).clamp(-60_000, None).to(dtype)
    largest = 65280.0 if dtype is torch.bfloat16 else FP16_MAX  # bfloat16 has no 65504, and must not pass it
    clamp = clamp_residuals(model, (name for name in "012"))
    with pytest.warns(UserWarning, match="clamp_residuals: 1 of 2 values that 2 returned lay beyond 65504"):
        y = model(x)
    assert y.dtype == dtype
    assert y[0] == (torch.inf if dtype is torch.float16 else model[3](torch.tensor(largest, dtype=dtype)))
    assert y[1].isfinite()
    infinite = 1 if dtype is torch.float16 else 0
    counts = clamp.counts()
    assert counts["2"] == Clamped(values=2, clamped=1, infinite=infinite)
    assert counts["0"] == Clamped(values=2, clamped=0, infinite=0)
    clamp.remove()
    assert model(x)[0] > largest


@each("value", [math.inf, -math.inf, math.nan, 65504.0, -65504.0, 65505.0, -0.0, 1e38])
def test_every_kind_of_value(value: float) -> None:
    model = nn.Identity()
    with warnings.catch_warnings(), clamp_residuals(model, "model") as clamp:
        warnings.simplefilter("ignore")
        y = model(torch.tensor([value]))
        counts = clamp.counts()["model"]
    if math.isnan(value):
        assert y.isnan().all()
    else:
        assert y.item() == max(min(value, FP16_MAX), -FP16_MAX)
        assert math.copysign(1, y.item()) == math.copysign(1, value)
    beyond = abs(value) > FP16_MAX
    assert counts == Clamped(values=1, clamped=int(beyond), infinite=int(math.isinf(value)))


@pytest.mark.parametrize(("gradient", "expected"), [("zero", [1.0, 0.0, 0.0]), ("pass", [1.0, 1.0, 1.0])])
def test_the_gradient_of_a_clamped_value(gradient: str, expected: list[float]) -> None:
    model, x = nn.Identity(), torch.tensor([1.0, 1e6, math.inf], requires_grad=True)
    with warnings.catch_warnings(), clamp_residuals(model, "model", gradient=gradient):
        warnings.simplefilter("ignore")
        model(x).sum().backward()
    assert x.grad.tolist() == expected


def test_it_is_told_once_a_module() -> None:
    model, x = stream(3), torch.tensor([40_000.0])
    with warnings.catch_warnings(record=True) as caught, clamp_residuals(model, ["0", "1"]) as clamp:
        warnings.simplefilter("always")
        for _ in range(3):
            model(x)
    assert [str(w.message).split(" values that ")[1][0] for w in caught] == ["0", "1"]
    assert clamp.counts()["0"] == Clamped(values=3, clamped=3, infinite=0)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_outputs_of_every_structure() -> None:
    class Many(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            return {"a": (x, [x, x.int()]), "pair": Pair(x, -x), "none": None}

    model, x = Many(), torch.tensor([1e6])
    with pytest.warns(UserWarning, match="4 of 4 values"), clamp_residuals(model, "model", "bf16"):
        model(torch.tensor([math.inf]))
    with warnings.catch_warnings(), clamp_residuals(model, "model"):
        warnings.simplefilter("ignore")
        y = model(x)
    assert y["a"][0] == FP16_MAX and y["a"][1][0] == FP16_MAX and y["a"][1][1] == 1_000_000
    assert isinstance(y["pair"], Pair) and y["pair"].second == -FP16_MAX and y["none"] is None
    assert x == 1e6  # what was given is not changed


def test_a_carrier_without_the_largest_value_stays_below_it() -> None:
    model = nn.Identity()
    with pytest.warns(UserWarning, match="2 of 2 values"), clamp_residuals(model, "model"):
        assert model(torch.tensor([1e5, -65536.0], dtype=torch.bfloat16)).tolist() == [65280.0, -65280.0]


def test_calls_in_inference_mode_count_with_those_outside_of_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    clamp = clamp_residuals(model, "0")
    for inside in (True, False, True):
        with torch.inference_mode(inside):
            model(torch.ones(1, 2))
    assert clamp.counts()["0"] == Clamped(values=6, clamped=0, infinite=0)


def test_other_formats() -> None:
    model = nn.Identity()
    with warnings.catch_warnings(), clamp_residuals(model, "model", "e4m3"):
        warnings.simplefilter("ignore")
        assert model(torch.tensor([1e6, -3.0])).tolist() == [448.0, -3.0]


def test_a_step_with_clamping_trains_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), stream(3), nn.Linear(4, 1))
    with pytest.warns(UserWarning, match="lay beyond 65504"), clamp_residuals(model, "1.*", gradient="pass"):
        model(torch.randn(8, 4)).mean().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in model[0].parameters())


def test_under_compile() -> None:
    model, x = stream(4), torch.tensor([1.0])
    clamp = clamp_residuals(model, "2")
    compiled = torch.compile(model, backend="eager")
    assert compiled(x) == FP16_MAX + 30_000
    with pytest.warns(UserWarning, match="1 of 1 values that 2 returned"):
        clamp.remove()


@each(
    ("arguments", "options", "message"),
    [
        (
            ("blocks.*",),
            {},
            r"expected the names of modules; got 'blocks.\*', which none has. There are, among others: m",
        ),
        (((),), {}, "expected at least one module; got none"),
        ((3,), {}, "expected modules to be a list; got modules=3"),
        (([3],), {}, "expected the names of modules; got 3, which none has"),
        (([["0"]],), {}, r"expected the names of modules; got \['0'\], which none has"),
        (("0", "mxfp8_e4m3"), {}, "expected a format of single numbers; got mxfp8_e4m3"),
        (("0",), {"gradient": "half"}, "expected gradient to be 'zero' or 'pass'; got gradient='half'"),
        (("0",), {"check_every": 0}, "expected check_every to be an integer of at least 1; got check_every=0"),
    ],
)
def test_mistakes(arguments: tuple[object, ...], options: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        clamp_residuals(stream(), *arguments, **options)
    with pytest.raises(ArgumentError, match="expected a torch.nn.Module; got list"):
        clamp_residuals([stream()], "0")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:clamp_residuals")
@pytest.mark.parametrize("first", [False, True])
def test_who_looks_at_a_module_is_given_the_clamped_values_if_the_clamp_comes_first(first: bool) -> None:
    model, seen = stream(3), []
    model[2].register_forward_hook(lambda module, args, output: seen.append(output.max().item()))
    with clamp_residuals(model, "2", first=first):
        y = model(torch.tensor([0.0]))
    assert y.item() == FP16_MAX
    assert seen == [FP16_MAX if first else 90_000.0]
