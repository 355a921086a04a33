"""The spectral scaler in training: gradients of real models, checkpoints, what it reports, and what it refuses."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll
from plimsoll.errors import ArgumentError, FormatError, NotRecordedError
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.scaling import DynamicScaler, SpectralScaler
from plimsoll.scaling.spectral.rule import MeasuredStep, Memory
from plimsoll.scaling.spectral.scale_windows import StepNumbers
from tests.support.cases import each
from tests.support.scaling.steps import host_reads_nothing, mlp, scales, take, weight


def settled(level: float, margin: float = 0.5) -> int:
    """The exponent that a steady largest gradient leads to."""
    return math.floor(math.log2(65520.0) - level - margin)


class Half(nn.Module):
    """A float16 network whose gradients shrink with depth."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.half()).float()


def train(
    scaler: Any, model: nn.Module, optimizer: Any, steps: range, loudness: Any = lambda _: 1.0
) -> list[tuple[float, bool]]:
    """So many steps on the same data in every run; the scale that each took, and whether it stepped."""
    found = []
    for step in steps:
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(data)[:, 0] - data.sum(dim=1)).square().mean() * loudness(step)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        taken = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        found.append((taken, scaler.outcome.stepped))
    return found


def half_and_sgd() -> tuple[Half, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Half()
    return model, torch.optim.SGD(model.parameters(), lr=1e-7)  # slow: gradients are as large as the test has them


def test_float16_training_hardly_overflows_where_the_stock_scaler_does_again_and_again() -> None:
    ours, stock = [
        train(scaler, *half_and_sgd(), range(150), lambda step: 2.0 ** (step / 15))
        for scaler in (SpectralScaler("cpu"), DynamicScaler("cpu", regrowth_interval=None))
    ]
    assert sum(not stepped for _, stepped in stock) >= 10
    assert sum(not stepped for _, stepped in ours) <= 1
    assert ours[-1][0] < ours[20][0] / 2**6, "it followed the gradients down"


def test_a_burst_in_float16_training() -> None:
    model, optimizer = half_and_sgd()
    scaler = SpectralScaler("cpu")
    found = train(scaler, model, optimizer, range(100), lambda step: 2.0**11 if 40 <= step < 60 else 1.0)
    skipped = [step for step, (_, stepped) in enumerate(found) if not stepped]
    assert 3 <= len(skipped) <= 5 and min(skipped) == 40 and max(skipped) < 60
    assert found[99][0] >= found[39][0] / 2
    assert all(p.isfinite().all() for p in model.parameters())


def test_it_decides_as_the_rule_does_on_the_spectra_of_its_gradients() -> None:
    model, optimizer = half_and_sgd()
    scaler, memory = SpectralScaler("cpu"), Memory()
    for step in range(60):
        data = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        scaler.scale(model(data).square().mean() * (2.0**30 if step == 30 else 1e-4)).backward()
        spectrum = sum(plimsoll.measure([p.grad for p in model.parameters()]))
        overflowed = spectrum.nonfinite > 0
        look = MeasuredStep(
            overflowed=overflowed,
            absmax=0.0 if overflowed else spectrum.absmax,
            nonzero=spectrum.nonzero,
            faint=int(spectrum.binades[: -24 + 149 + 1].sum()),
        )
        expected = scaler._rule().next_exponent(memory, look, scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**expected
    assert scaler._memory.to_dict() == memory.to_dict() and memory.trend.forecast is not None


def test_gradients_that_are_about_to_be_lost_raise_the_scale() -> None:
    parameter = weight(*torch.full((100,), 1.0).tolist(), dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = SpectralScaler("cpu", init_scale=1.0)
    scaler.scale((parameter.float() * 2.0**-23).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._memory.faint is False
    optimizer.zero_grad()
    scaler.update(1.0)
    scaler.scale((parameter.float() * 2.0**-24).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler._memory.faint is True and scaler.get_scale() == 2.0**32


@each("cut", [7, 41, 43, 50, 70])
@each("late", [False, True])
def test_resume_in_the_middle_of_a_burst_is_bit_identical(cut: int, late: bool) -> None:
    def loudness(step: int) -> float:
        return 1e6 if 40 <= step < 46 else 1.0

    def fresh() -> tuple[Any, ...]:
        scaler = SpectralScaler("cpu", inspect_every=5)
        scaler._late = late
        return scaler, *half_and_sgd()

    scaler, model, optimizer = fresh()
    whole = train(scaler, model, optimizer, range(90), loudness)
    first, first_model, first_optimizer = fresh()
    train(first, first_model, first_optimizer, range(cut), loudness)
    saved = copy.deepcopy((first.state_dict(), first_model.state_dict(), first_optimizer.state_dict()))
    second, second_model, second_optimizer = fresh()
    for one, state in zip((second, second_model, second_optimizer), saved, strict=True):
        one.load_state_dict(state)
    assert train(second, second_model, second_optimizer, range(cut, 90), loudness) == whole[cut:]
    assert second.state_dict() == scaler.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), second_model.parameters(), strict=True))


def test_states_are_plain_and_keep_every_setting(tmp_path: Any) -> None:
    scaler = SpectralScaler(
        "cpu", 2.0**4, format="bf16", margin=2.5, inspect_every=7, min_scale=2.0**-3, max_scale=2.0**20
    )
    train(scaler, *half_and_sgd(), range(20))
    torch.save(scaler.state_dict(), tmp_path / "state.pt")
    again = SpectralScaler("cpu")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == scaler.state_dict()
    assert again._rule() == scaler._rule() and again._checks.every == 7
    pickled = pickle.loads(pickle.dumps(scaler))
    assert pickled.state_dict() == scaler.state_dict()
    assert train(pickled, *half_and_sgd(), range(20, 30)) == train(scaler, *half_and_sgd(), range(20, 30))


def test_gradscaler_states_both_ways() -> None:
    stock = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    scaler = SpectralScaler("cpu")
    scaler.load_state_dict(stock.state_dict())
    assert scaler.get_scale() == 2.0**7
    assert scales(scaler, [False] * 40)[-1] == 2.0 ** settled(-2.0)
    stock.load_state_dict(scaler.state_dict())
    assert stock.get_scale() == scaler.get_scale()


def test_a_dynamic_scalers_state_gives_its_scale_with_a_warning() -> None:
    scaler = SpectralScaler("cpu")
    with pytest.warns(UserWarning, match="a DynamicScaler wrote the state"):
        scaler.load_state_dict(DynamicScaler("cpu", init_scale=2.0**9).state_dict())
    assert scaler.get_scale() == 2.0**9


def test_an_amp_gradient_may_be_larger_than_it_seems() -> None:
    """Float32 parameters: activations' gradients are float16, and overflow 2**6 below what the parameters' show."""
    parameter = weight(*[1.0] * 10)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = SpectralScaler("cpu")
    skipped = 0
    for _ in range(400):
        optimizer.zero_grad()
        hidden = (parameter * 2.0**-6).half()  # its gradient is 2**6 times the parameter's
        scaler.scale(hidden.float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += not scaler.outcome.stepped
    assert scaler.get_scale() in (2.0**14, 2.0**15) and skipped <= 14


def test_a_float16_loss_keeps_the_scale_within_float16() -> None:
    parameter = weight(1e-4, dtype=torch.float16)
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = SpectralScaler("cpu")
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale((parameter * 2.0**-12).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome.stepped
    assert scaler.get_scale() == 2.0**15


def test_bfloat16_has_a_line_of_its_own_and_float16_gradients_lower_it() -> None:
    assert scales(SpectralScaler("cpu", format="bf16"), [False] * 20)[-1] == 2.0**32
    half = weight(1.0, dtype=torch.float16)
    found = SpectralScaler("cpu", format="bf16")
    steps(found, torch.optim.SGD([half], lr=0.0), lambda: half.float().sum() * 0.25, 20)
    assert found.get_scale() == 2.0 ** settled(-2.0)


def test_several_optimizers_share_one_scale_that_suits_the_larger() -> None:
    small, large = weight(1.0), weight(1.0)
    optimizers = [torch.optim.SGD([p], lr=0.0) for p in (small, large)]
    scaler = SpectralScaler("cpu")
    for _ in range(30):
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale((small * 2.0**-20 + large * 8).sum()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0 ** settled(3.0)
    assert {t.name for t in scaler.report().tensors} == {"parameter 0 in group 0 of SGD"}
    assert len(scaler.report().tensors) == 2
    del small, large, optimizers, optimizer
    assert len(scaler._banks) == 0, "banks go with their optimizers"


def test_zero_gradients_for_a_thousand_steps_and_none_at_all() -> None:
    parameter, unused = weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([parameter, unused], lr=0.0)
    scaler = SpectralScaler("cpu")
    for _ in range(1000):
        optimizer.zero_grad()
        scaler.scale((parameter * 0.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**10 and scaler.window is None and scaler.report().finding is None


def test_a_thousand_non_finite_steps_stop_at_the_floor() -> None:
    parameter = weight(1.0, 1.0)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = SpectralScaler("cpu")
    found = scales(scaler, [True] * 1000 + [False] * 60, optimizer)
    assert min(found) == 2.0**-14 and found[999] == 2.0**-14
    assert found[-1] == 2.0 ** settled(-2.0) and parameter.isfinite().all()


def test_unscaled_gradients_are_exact_and_the_norm_is_known() -> None:
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = SpectralScaler("cpu")
    data = torch.randn(4, 8)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(data).square().sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    twin(data).square().sum().backward()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    norm = torch.linalg.vector_norm(torch.stack([b.grad.norm() for _, b in pairs])).item()
    assert scaler.outcome.grad_norm == pytest.approx(norm, rel=1e-6)
    take(scaler, optimizer, overflows=True)
    assert scaler.outcome.grad_norm == math.inf


# -- on a device, whose numbers come later -----------------------------------------------------------------------------


def late(scaler: SpectralScaler) -> SpectralScaler:
    """A scaler that treats the CPU as it treats other devices."""
    scaler._late = True
    return scaler


def test_late_spectra_lead_to_the_same_scales_a_step_later() -> None:
    trace = [False] * 30 + [True] * 3 + [False] * 40
    now, then = scales(SpectralScaler("cpu"), trace), scales(late(SpectralScaler("cpu")), trace)
    assert then[0] == 2.0**10 and then[1:30] == now[:29]
    assert then[30:33] == [then[29] / 2, then[29] / 2**5, then[29] / 2**17], "overflow is answered at once"
    assert then[-1] == now[-1] and then[34:] == now[33:-1]


def test_without_synchronisation_nothing_is_read_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.Adam([weight(1.0)], lr=0.0, fused=True)
    scaler = late(SpectralScaler("cpu", sync_free=True))
    monkeypatch.setattr(DeviceValue, "ready", lambda _: False)
    monkeypatch.setattr(DeviceValue, "tensor", lambda _: pytest.fail("the host waits for the device"))
    trace = [False, False, True, False, True, False]
    assert scales(scaler, trace, optimizer) == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**8, 2.0**8]
    assert len(scaler._waiting) == len(trace)
    monkeypatch.undo()
    take(scaler, optimizer, overflows=True)
    assert scaler.get_scale() == 2.0**7, "a plan that knows nothing of this overflow is dropped"
    assert scales(scaler, [False] * 150, optimizer)[-1] == 2.0 ** settled(-2.0)


def test_a_plan_older_than_an_overflow_does_not_undo_what_was_done_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.Adam([weight(1.0)], lr=0.0, fused=True)
    scaler = late(SpectralScaler("cpu", sync_free=True))
    there: list[StepNumbers] = []
    monkeypatch.setattr(StepNumbers, "ready", lambda facts: facts in there)
    scales(scaler, [False, True], optimizer)
    there.append(scaler._waiting[0])
    assert scales(scaler, [False], optimizer) == [2.0**9], "the first step asks for more, and knows less"
    there.extend(scaler._waiting)
    assert scales(scaler, [False], optimizer) == [2.0**9], "the overflow's own plan"
    assert scaler._known_overflows == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_what_was_measured_before_a_scale_was_given_is_not_taken_for_measured_at_it(is_late: bool) -> None:
    scaler, optimizer = SpectralScaler("cpu"), torch.optim.SGD([weight(1.0)], lr=0.0)
    scaler._late = is_late
    scales(scaler, [False] * 30, optimizer)
    steady = scaler.get_scale()
    scaler.scale((optimizer.param_groups[0]["params"][0] * 0.0).sum()).backward()
    scaler.step(optimizer)
    scaler.update(2.0**-10)
    assert scales(scaler, [False] * 5, optimizer)[1:] == [steady] * 4
    assert scaler._memory.trend.forecast == pytest.approx(-2.0)


def test_an_update_on_a_device_reads_no_value() -> None:
    optimizer = torch.optim.SGD([weight(1.0)], lr=0.0)
    scaler = late(SpectralScaler("cpu"))
    take(scaler, optimizer, overflows=False)
    optimizer.zero_grad()
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    scaler.step(optimizer)
    with host_reads_nothing():
        scaler.update()


def test_a_scale_that_is_given_holds_for_one_step_after_overflow_too() -> None:
    scaler = SpectralScaler("cpu")
    scales(scaler, [False] * 20 + [True] * 4)
    scaler.update(2.0**3)
    assert scaler.get_scale() == 2.0**3
    assert scales(scaler, [False])[-1] == 2.0 ** settled(-2.0)


# -- what it says ------------------------------------------------------------------------------------------------------


def spanning(*exponents: int) -> tuple[list[nn.Parameter], Any]:
    """Parameters, and a loss whose gradient has those exponents in each of them."""
    parameters = [weight(*[1.0] * len(exponents)) for _ in range(2)]
    factors = torch.tensor([2.0**k for k in exponents])
    return parameters, lambda: (parameters[0] * factors).sum() + parameters[1].sum()


def steps(scaler: SpectralScaler, optimizer: Any, loss: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("is_late", [False, True])
def test_tensors_that_span_too_far_are_named_once(is_late: bool) -> None:
    parameters, loss = spanning(-45, -44, 3)
    optimizer = torch.optim.SGD([("wide", parameters[0]), ("narrow", parameters[1])], lr=0.0)
    scaler = SpectralScaler("cpu", inspect_every=5)
    scaler._late = is_late
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(scaler, optimizer, loss, 5)
    with pytest.warns(UserWarning, match=r"no scale fits: .* 1 of 2 tensors .* fp16 has: wide by 9\. Give") as said:
        steps(scaler, optimizer, loss, 50)
    assert len(said) == 1
    assert scaler.window is None and [t.name for t in scaler.report().too_wide] == ["wide"]
    again = SpectralScaler("cpu")
    again.load_state_dict(scaler.state_dict())
    steps(again, optimizer, loss, 30)  # said already: a warning would be an error here


def test_one_odd_look_says_nothing_and_non_finite_ones_are_no_looks() -> None:
    parameters, loss = spanning(-45, -44, 3)
    optimizer = torch.optim.SGD(parameters, lr=0.0)
    scaler = SpectralScaler("cpu", inspect_every=1)
    for _ in range(4):
        steps(scaler, optimizer, loss, 1)
        report = scaler.report()
        take(scaler, optimizer, overflows=True)
        assert scaler.report() == report
        take(scaler, optimizer, overflows=False)
        assert scaler.window == (-22, 17)


def test_names_come_from_the_optimizer_where_it_has_them() -> None:
    model = mlp()
    scaler = SpectralScaler("cpu")
    named = torch.optim.SGD(model.named_parameters(), lr=0.0)
    train(scaler, model, named, range(1))
    assert [t.name for t in scaler.report().tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_report_before_any_step_is_refused() -> None:
    scaler = SpectralScaler("cpu")
    with pytest.raises(NotRecordedError, match="report: expected a step with finite gradients before; got none"):
        scaler.report()
    take(scaler, torch.optim.SGD([weight()], lr=0.0), overflows=True)
    with pytest.raises(NotRecordedError, match="and every 100th: train for longer"):
        _ = scaler.window


# -- arguments ---------------------------------------------------------------------------------------------------------


@each(
    ("arguments", "message"),
    [
        ({"margin": -1}, "expected margin to be a number of at least 0 and of at most 16; got margin=-1"),
        ({"margin": math.nan}, "expected margin to be a number .*; got margin=nan"),
        ({"margin": True}, "expected margin to be a number .*; got margin=True"),
        ({"inspect_every": 0}, "expected inspect_every to be an integer of at least 1; got inspect_every=0"),
        ({"init_scale": 3.0}, r"expected init_scale as a power of two.*; got 3.0. Use 2.0\*\*2"),
        ({"min_scale": 0.3}, r"expected min_scale as a power of two"),
        ({"max_scale": 1000.0, "init_scale": 1.0}, r"expected max_scale as a power of two"),
        ({"init_scale": 0.0}, r"expected init_scale from 2\*\*-126"),
        ({"min_scale": 2.0**12}, r"expected min_scale <= init_scale <= max_scale"),
        ({"format": "fp64"}, "expected a signed format within float32's range; got format=fp64"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SpectralScaler("cpu", **arguments)


@each("given", ["mxfp8_e4m3", "nonsense", "e8m0"])
def test_formats_that_hold_no_gradients_are_refused(given: str) -> None:
    with pytest.raises((FormatError, ArgumentError)):
        SpectralScaler("cpu", format=given)


@each("setter", ["set_growth_factor", "set_backoff_factor", "set_growth_interval"])
def test_it_has_no_growth_rule_to_set(setter: str) -> None:
    with pytest.raises(ArgumentError, match=f"{setter}: expected a scaler with a growth rule; got 2 for a Spectral"):
        getattr(SpectralScaler("cpu"), setter)(2)


def test_disabled_it_does_nothing() -> None:
    scaler = SpectralScaler("cpu", enabled=False)
    parameter = weight(1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    take(scaler, optimizer, overflows=False)
    assert parameter.item() == 0.75 and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    assert scaler.outcome.stepped and scaler.outcome.grad_norm is None


def test_bounds_that_are_no_powers_of_two_are_kept_from_inside() -> None:
    dynamic = DynamicScaler("cpu", init_scale=2.0, min_scale=1.5, max_scale=100.0).state_dict()
    scaler = SpectralScaler("cpu")
    with pytest.warns(UserWarning, match="a DynamicScaler wrote the state"):
        scaler.load_state_dict(dynamic)
    found = scales(scaler, [False] * 30 + [True] * 30)
    assert max(found) == 64.0 and min(found) == 2.0
