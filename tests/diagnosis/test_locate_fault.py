"""What a fault says: records, text, flushes, the first of several, and odd closures."""

# ruff: noqa: PLW0108  (a lambda here is the closure, whose operations must run inside locate)

import json
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Fault, locate
from tests.support.versions import is_older


def found(closure: Callable[[], Any], **arguments: Any) -> Fault:
    fault = locate(closure, **arguments)
    assert fault is not None
    return fault


def test_the_record_is_whole():
    x = torch.tensor([[1.0, -2.0], [0.0, 12.0]]).requires_grad_()
    fault = found(lambda: (x.half() * 60000).float().sum())
    assert fault.operation == "aten.mul"
    assert (fault.count, fault.total, fault.first_index) == (2, 4, (0, 1))
    assert fault.at == {"self": -2.0}
    assert fault.expected == -120000.0
    assert fault.scalars["other"] == 60000
    (read,) = [operand for operand in fault.inputs if operand.name == "self"]
    assert (read.dtype, read.shape) == ("fp16", (2, 2))
    assert read.spectrum is not None
    assert (read.spectrum.count, read.spectrum.zeros, read.spectrum.max) == (4, 1, 12.0)
    (given,) = fault.outputs
    assert given.spectrum is not None
    assert (given.spectrum.pos_infs, given.spectrum.neg_infs) == (1, 1)
    assert fault.reached == "the loss"
    assert fault.sentence == (
        "mul of -2 and 60,000 exceeds fp16's 65,504; the largest input was 2^3.6; it reached the loss."
    )


def test_the_record_as_data():
    x = torch.zeros(3, requires_grad=True)
    data = json.loads(json.dumps(found(lambda: (1 / x).sum()).to_dict(), allow_nan=False))
    assert data["operation"] == "aten.reciprocal"
    assert data["expected"] == "inf"
    assert data["inputs"][0]["spectrum"]["zeros"] == 3
    assert data["source"]["text"].startswith("data = json.loads")


def test_a_name_that_is_long_or_odd_fits_its_line():
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    model = nn.Module()
    name = "\x1b[31m" + "n" * 10_000
    model.add_module(name, Odd())
    inner = getattr(model, name)
    text = str(found(lambda: inner(torch.zeros(1)).sum(), model=model))
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "\x1b" not in text
    assert len(text) < 2000


def test_an_operand_that_is_overwritten_is_told_as_it_was():
    x = torch.tensor([4.0, 0.0])
    fault = found(lambda: x.reciprocal_().sum())
    assert fault.inputs[0].spectrum is not None
    assert (fault.inputs[0].spectrum.zeros, fault.inputs[0].spectrum.max) == (1, 4.0)
    assert fault.at == {"self": 0.0}
    assert x.tolist() == [4.0, 0.0]


def test_the_first_that_matters_is_named():
    x = torch.ones(2, requires_grad=True)

    def closure() -> Tensor:
        _unused = (x * 0).log()
        first = (x * 1e30).square()
        second = (x - 1).log()
        return (first + second).sum()

    fault = found(closure)
    assert fault.operation == "aten.pow"
    assert (fault.source and fault.source.text) == "first = (x * 1e30).square()"


def test_one_value_that_breaks_beside_a_mask():
    scores = torch.tensor([1e20, 1.0, 1.0]).requires_grad_()
    hidden = torch.tensor([False, True, False])
    fault = found(lambda: (scores.masked_fill(hidden, -torch.inf) * 1e30).max())
    assert (fault.operation, fault.count, fault.first_index) == ("aten.mul", 1, (0,))


def test_a_loss_of_several_terms_and_a_dictionary():
    x = torch.zeros(2, requires_grad=True)
    fault = found(lambda: {"loss": x.log().sum(), "logits": x})
    assert fault.operation == "aten.log"
    assert locate(lambda: {"loss": x.sum(), "mask": torch.full((2,), -torch.inf)}) is None
    assert locate(lambda: None) is None


def test_the_backward_starts_from_the_loss_among_other_results():
    x = torch.zeros(2, requires_grad=True)
    for returned in (
        lambda: {"loss": x.sqrt().sum(), "mean": x.mean()},
        lambda: types.SimpleNamespace(loss=x.sqrt().sum(), logits=x),
        lambda: (x.sqrt().sum(), x, x.detach().mean()),
    ):
        fault = found(returned)
        assert (fault.operation, fault.phase, fault.reached) == ("aten.div", "backward", "the gradient of x")


def test_a_closure_that_shows_no_loss_is_no_clean_bill():
    x = torch.zeros(2, requires_grad=True)
    for returned in (x.sqrt, lambda: (x.sqrt().sum(), x.sum())):
        with pytest.warns(RuntimeWarning, match="Only the forward was looked at. Return one number"):
            assert locate(returned) is None
    assert found(x.log).operation == "aten.log"  # without a warning


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_flush_is_named_when_asked_for(narrow: torch.dtype):
    small = 1e-9 if narrow is torch.float16 else 1e-42
    x = torch.full((8,), small).requires_grad_()

    def closure() -> Tensor:
        y = torch.cat([x.relu(), torch.zeros(100)])
        return y.to(narrow).float().sum()

    assert locate(closure) is None
    fault = found(closure, flush_share=0.5)
    assert (fault.kind, fault.operation, fault.phase) == ("flush", "aten._to_copy", "forward")
    assert (fault.count, fault.total, fault.first_index) == (8, 8, (0,))  # the zeros of the rest are structural
    assert "flushed 100 % of its values to zero" in fault.sentence
    assert fault.expected == pytest.approx(small)


def test_a_flush_in_the_backward():
    w = torch.full((4,), 2.0, dtype=torch.float16, requires_grad=True)
    fault = found(lambda: (w.float() * 1e-9).sum(), flush_share=0.5)
    assert (fault.kind, fault.operation, fault.phase) == ("flush", "aten._to_copy", "backward")
    scaled = locate(lambda: (w.float() * 1e-9).sum() * 2.0**16, flush_share=0.5)
    assert scaled is None


def test_a_share_that_is_not_reached_is_no_fault():
    x = torch.tensor([1.0, 1.0, 1.0, 1e-9])
    assert locate(lambda: x.half().sum(), flush_share=0.5) is None
    assert found(lambda: x.half().sum(), flush_share=0.2).count == 1


def test_matrix_products_and_sums_that_cancel_are_no_flush():
    a = torch.tensor([[1.0, 1.0]], dtype=torch.float16)
    assert locate(lambda: (a @ torch.tensor([[1.0], [-1.0]], dtype=torch.float16)).sum(), flush_share=0.0) is None
    assert locate(lambda: (a - a).sum(), flush_share=0.0) is None
    fault = found(lambda: ((a * 1e-4) @ (a * 1e-4).T).sum(), flush_share=0.5)
    assert fault.operation == "aten.mm"


def test_a_closure_that_raises_because_of_it():
    x = torch.zeros(1, requires_grad=True)

    def closure() -> Tensor:
        loss = x.log().sum()
        if not torch.isfinite(loss):
            raise FloatingPointError("loss is not finite")
        return loss

    fault = found(closure)
    assert fault.operation == "aten.log"
    assert fault.error == "FloatingPointError: loss is not finite"
    with pytest.raises(FloatingPointError, match="of its own"):
        locate(_raise)


def _raise() -> Tensor:
    raise FloatingPointError("of its own")


def test_gradients_that_the_closure_clears_are_seen():
    x = torch.zeros(2, requires_grad=True)

    def closure() -> None:
        x.sqrt().sum().backward()
        x.grad = None

    assert found(closure).phase == "backward"


def test_what_a_step_leaves_behind():
    model = nn.BatchNorm1d(2).half()
    x = torch.full((4, 2), 6e4, dtype=torch.float16)
    x[0] = -6e4
    fault = found(lambda: (model(x) * 0).sum().float(), model=model)
    assert fault.kind == "inf"
    assert fault.reached is not None


def test_a_sparse_gradient():
    table = nn.Embedding(4, 2, sparse=True)
    x = torch.tensor([0, 3])
    fault = found(lambda: table(x).mul(0).sqrt().sum())
    assert (fault.forward, fault.reached) == ("aten.sqrt", "the gradient of weight")


def test_several_modules_are_told_apart():
    encoder, head = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 1)
    with torch.no_grad():
        head.weight.fill_(float("inf"))
    x = torch.ones(1, 2)
    fault = found(lambda: head(encoder(x)).sum())
    assert (fault.module, fault.phase) == ("Linear", "before")
    assert "Linear.weight held 2 Inf" in fault.sentence


def test_gradients_of_gradients():
    x = torch.tensor([1.0, 4.0], requires_grad=True)

    def closure() -> Tensor:
        (slope,) = torch.autograd.grad(x.sqrt().sum(), x, create_graph=True)
        return (slope - slope.detach()).abs().sqrt().sum()

    fault = found(closure)
    assert (fault.phase, fault.forward) == ("backward", "aten.sqrt")


def test_plimsoll_casts_are_seen():
    x = torch.tensor([1.0, 1e6], requires_grad=True)
    fault = found(lambda: pl.fake_quantize(x, forward="fp16").sum())
    assert fault.operation.startswith("plimsoll.")
    assert fault.first_index == (1,)
    assert math.isinf(fault.outputs[0].spectrum.absmax) is False  # extremes are of the finite values


def test_memory_written_behind_torch_is_told_as_such():
    x = torch.zeros(2)

    def closure() -> Tensor:
        loss = x.sum()
        loss.numpy()[...] = float("nan")
        return loss

    fault = found(closure)
    assert fault.operation == "unknown"
    assert "torch's dispatcher does not show" in fault.sentence


def test_a_copy_into_a_narrower_tensor():
    x, narrow = torch.tensor([1.0, 7e4]), torch.zeros(2, dtype=torch.float16)
    fault = found(lambda: narrow.copy_(x).float().sum())
    assert (fault.operation, fault.expected) == ("aten.copy_", 7e4)
    assert "the cast of 70,000 to fp16 exceeds fp16's 65,504" in fault.sentence


# -- constants that a closure makes itself


def filled(value: float) -> Tensor:
    y = torch.zeros(6, 2)
    y[3, 1] = value
    return y


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    ("target", "operation"),
    [
        (filled, "lift_fresh" if is_older("2.15") else "fill_"),
        (lambda value: torch.full((6, 2), value), "full"),
        (lambda value: torch.zeros(6, 2).fill_(value), "fill_"),
        (lambda value: torch.tensor([value, 0.0]).expand(6, 2), "lift_fresh"),
    ],
)
def test_a_constant_that_the_loss_is_lost_by_was_not_meant(
    value: float, target: Callable[[float], Tensor], operation: str
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(6, 3)
    fault = found(lambda: nn.functional.mse_loss(model(x), target(value)), model=model)
    assert (fault.operation, fault.phase, fault.reached) == (f"aten.{operation}", "forward", "the loss")
    said = {math.inf: "Inf", -math.inf: "-Inf"}.get(value, "NaN")
    assert fault.source is not None and fault.source.file.endswith("test_locate_fault.py")
    assert fault.sentence == (
        f"a constant was made with {said} in it at test_locate_fault.py:{fault.source.line}; it reached the loss."
    )


def test_a_number_that_is_filled_in_is_called_a_constant():
    x = torch.ones(4, requires_grad=True)
    fault = found(lambda: x.masked_fill(torch.arange(4) == 2, math.inf).mean())
    assert fault.operation == "aten.masked_fill" and fault.source is not None
    assert fault.sentence == (
        f"masked_fill wrote the constant Inf at test_locate_fault.py:{fault.source.line}; it reached the loss."
    )


def test_a_constant_that_an_operation_makes_nan_of_is_named_with_its_line():
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    weight, hidden = math.inf, torch.tensor([True, False])
    for closure, whose in (
        (lambda: (x * weight).sum(), "Inf of mul"),
        (lambda: (x + weight).softmax(0).sum(), "Inf of add"),
        (lambda: x.masked_fill(hidden, -math.inf) @ torch.zeros(2), "-Inf of masked_fill"),
        (lambda: torch.full((2,), math.inf) @ (0 * x), "Inf"),
    ):
        fault = found(closure)
        assert fault.source is not None
        line = f" at test_locate_fault.py:{fault.source.line};"
        assert f"gave NaN from the constant {whose}{line}" in fault.sentence, fault.sentence


def test_a_mask_that_the_loss_leaves_out_is_no_cause_of_what_breaks_a_gradient():
    """A row that is masked is left out of the loss, but 0 times Inf comes back through the root."""
    x = torch.zeros(4, requires_grad=True)
    mask = torch.tensor([True, False, False, False])
    fault = found(lambda: torch.where(mask, x.sqrt().masked_fill(~mask, -math.inf), 1.0).sum())
    assert "constant" not in fault.sentence and fault.reached == "the gradient of x"


def test_complex_values_are_followed_to_the_loss():
    x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    fault = found(lambda: (x / 0).abs().sum())
    assert (fault.operation, fault.reached, fault.error) == ("aten.div", "the loss", None)


def test_a_class_without_weight_whose_logit_is_masked_is_no_missing_target():
    logits = torch.tensor([[0.0, -math.inf]], requires_grad=True)
    fault = found(lambda: nn.functional.nll_loss(logits, torch.tensor([1]), weight=torch.tensor([1.0, 0.0])))
    assert fault.operation == "aten.nll_loss_forward" and "ignored" not in fault.sentence


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_hinder_no_closure():
    x: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True)
    assert found(lambda: (x * math.inf).to_padded_tensor(0.0).sum()).error is None
