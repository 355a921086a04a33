"""Gradients that an earlier backward left: called what they are, with what to do."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from plimsoll.diagnosis import locate
from tests.support.cases import each

Training = tuple[nn.Linear, torch.optim.SGD, Tensor]
ADVICE = "Clear gradients before the backward (optimizer.zero_grad()); locate the step that left this one."


def training() -> Training:
    """A model whose weight has a gradient of NaN from before."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.weight.grad = torch.full_like(model.weight, float("nan"))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)


def forward_alone(given: Training) -> Callable[[], object]:
    model, _, x = given
    return lambda: model(x).square().mean()


def whole_step(given: Training) -> Callable[[], object]:
    model, optimizer, x = given

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()

    return step


def with_the_gradient_at_hand(given: Training) -> Callable[[], object]:
    model, _, x = given
    gradient = model.weight.grad

    def backward() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        assert gradient is model.weight.grad
        return loss

    return backward


def update_alone(given: Training) -> Callable[[], object]:
    return given[1].step


@each("make", [forward_alone, whole_step, with_the_gradient_at_hand, update_alone])
def test_a_stale_gradient_is_no_input(make: Callable[[Training], Callable[[], object]]) -> None:
    given = training()
    fault = locate(make(given), model=given[0])
    assert fault is not None
    assert fault.sentence.startswith("the gradient of weight, left from an earlier backward, held 8 NaN before any ")
    assert fault.sentence.endswith(ADVICE)
    assert "the gradient of weight" in [operand.called for operand in fault.inputs]
    assert given[0].weight.grad is not None and bool(given[0].weight.grad.isnan().all())  # as it was


def test_a_stale_gradient_of_an_input_is_called_so() -> None:
    x = torch.ones(3, requires_grad=True)
    x.grad = torch.full((3,), float("inf"))

    def doubled() -> Tensor:
        return (x * 2).sum()

    fault = locate(doubled)
    assert fault is not None
    assert fault.sentence.startswith("the gradient of x, left from an earlier backward, held 3 Inf")


def test_cleared_gradients_are_no_fault() -> None:
    model, optimizer, x = training()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        optimizer.step()

    assert locate(step) is None


def test_a_gradient_broken_inside_is_not_stale() -> None:
    model, _, x = training()
    model.zero_grad()

    def twice() -> None:
        (model(x) - model(x)).square().sum().sqrt().backward()  # 0 times Inf
        model(x).square().mean().backward()

    fault = locate(twice)
    assert fault is not None
    assert "earlier" not in fault.sentence and ADVICE not in fault.sentence


def test_other_inputs_keep_their_names() -> None:
    model, _, x = training()
    model.zero_grad()
    x[0, 0] = float("nan")
    fault = locate(lambda: model(x).square().mean())
    assert fault is not None
    assert fault.sentence.startswith("the input x held 1 NaN") and ADVICE not in fault.sentence
