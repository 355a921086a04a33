"""What a step does, in all the ways in which a step can come: kinds of optimizers, of gradients, of loops."""

import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

from plimsoll.errors import ArgumentError, PlimsollError, StateError, UnsupportedTensorError
from plimsoll.scaling import DynamicScaler, Hysteresis, StaticScaler, StepOutcome, step
from tests.support.cases import each
from tests.support.scaling.steps import host_reads_nothing, outcomes, same_tensors, scales, take, weight
from tests.support.versions import only_from

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad]
_ADAGRAD = pytest.param(torch.optim.Adagrad, marks=only_from("2.13", "a fused Adagrad that skips steps on the device"))
SKIPPING = [*FUSED[:-1], _ADAGRAD]
ALL = [
    kind for _, kind in inspect.getmembers(torch.optim, inspect.isclass)
    if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    and kind not in (torch.optim.LBFGS, torch.optim.SparseAdam)
]  # fmt: skip


def variants(kind: Any) -> list[dict[str, bool]]:
    names = inspect.signature(kind).parameters
    return [
        {},
        *({"foreach": True} for _ in [0] if "foreach" in names),
        *({"fused": True} for _ in [0] if kind in FUSED),
    ]


@each(("kind", "flags"), [(kind, flags) for kind in ALL for flags in variants(kind)])
def test_every_optimizer_of_torch_skips_and_steps(kind: Any, flags: dict[str, bool]) -> None:
    def parameter() -> nn.Parameter:
        return nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))

    alone, scaled = parameter(), parameter()
    reference, optimizer = kind([alone], lr=0.1), kind([scaled], lr=0.1, **flags)
    scaler = DynamicScaler("cpu")
    # The scale is a power of two and gradients are 0.25, so that scaled training is exact; a skip leaves no trace.
    for overflows in (True, False, False, True, False):
        take(scaler, optimizer, overflows=overflows)
        assert scaler.outcome.stepped is not overflows
        if overflows:
            assert "1 of 4 values of parameter 0 in group 0" in scaler.outcome.reason
            continue
        alone.grad = torch.full_like(alone, 0.25)
        reference.step()
        torch.testing.assert_close(scaled, alone, rtol=1e-6, atol=0.0)
    assert scaler.get_scale() == 2.0**14


def test_sparse_adam() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer, scaler = torch.optim.SparseAdam(table.parameters(), lr=0.1), DynamicScaler("cpu")
    before = table.weight.detach().clone()
    for factor in (1.0, math.inf):
        optimizer.zero_grad()
        scaler.scale(table(torch.tensor([1, 1, 3])).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not scaler.outcome.stepped and "of 6 values of parameter 0 in group 0 of SparseAdam" in scaler.outcome.reason
    moved = (table.weight != before).any(1)
    assert moved.tolist() == [False, True, False, True] and table.weight.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradients_of_low_precision_weights(dtype: torch.dtype) -> None:
    parameter = weight(1.0, 2.0, dtype=dtype)
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DynamicScaler("cpu", 2.0**10)
    take(scaler, optimizer, overflows=False)
    assert parameter.tolist() == [0.75, 1.75] and scaler.outcome.stepped
    take(scaler, optimizer, overflows=True)
    assert parameter.tolist() == [0.75, 1.75] and not scaler.outcome.stepped


def test_a_gradient_that_unscaling_would_push_past_its_dtype_is_never_used() -> None:
    for dtype, value in ((torch.float32, 1e37), (torch.float16, 60000.0)):
        parameter = weight(1.0, dtype=dtype)
        optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DynamicScaler("cpu", 2.0**-10)
        scaler.scale(parameter.sum()).backward()
        parameter.grad.fill_(value)
        scaler.step(optimizer)
        assert parameter.item() == 1.0 and not scaler.outcome.stepped
        stock = torch.amp.GradScaler("cpu", 2.0**-10)
        if dtype is torch.float32:
            parameter.grad.fill_(value)
            stock.scale(parameter.sum())
            stock.step(optimizer)
            assert not parameter.isfinite().all()  # what GradScaler does: the reason for the promise


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100, 2.0**-14, 1.0, 2.0**100, 2.0**127])
def test_unscaling_by_a_power_of_two_is_exact_at_both_ends(scale: float) -> None:
    parameter = weight(1.0, 1.0, 1.0)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = StaticScaler(scale, device="cpu")
    scaler.scale(parameter.sum())
    true = torch.tensor([1.0, -1.2345678, 2.0**-20])
    parameter.grad = (true.double() * scale).float()
    carried = parameter.grad.double() / scale
    scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad.double(), carried)


def test_the_outcome_of_a_fused_step_is_exact() -> None:
    parameter = weight()
    optimizer, scaler = torch.optim.AdamW([parameter], fused=True), DynamicScaler("cpu")
    found = outcomes(scaler, optimizer, [False, True, False])
    assert [o.stepped for o in found] == [True, False, True]
    assert [o.scale for o in found] == [2.0**16, 2.0**16, 2.0**15]
    assert found[1].reason == "non-finite gradients in 1 of 2 values of parameter 0 in group 0 of AdamW"
    assert optimizer.state[parameter]["step"].item() == 2.0


@pytest.mark.parametrize("kind", SKIPPING)
def test_in_sync_free_mode_the_host_reads_nothing(kind: Any) -> None:
    parameter, other = weight(1.0, 2.0, 3.0), weight(1.0, 2.0, 3.0)
    arguments = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    free, plain = kind([parameter], lr=0.1, fused=True, **arguments), kind([other], lr=0.1, fused=True, **arguments)
    scaler, reference = DynamicScaler("cpu", growth_interval=2, sync_free=True), DynamicScaler("cpu", growth_interval=2)
    trace = [True, False, False, True, False]
    for optimizer in (free, plain):  # so that SGD's first momentum, which torch leaves unset, is seen to matter
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].grad = torch.full((3,), torch.nan)
    with host_reads_nothing():
        found = outcomes(scaler, free, trace)
    expected = outcomes(reference, plain, trace)
    assert [o.stepped for o in found] == [o.stepped for o in expected] == [not t for t in trace]
    assert [o.scale for o in found] == [o.scale for o in expected]
    assert found[0].reason == f"non-finite gradients in {kind.__name__}"
    assert scaler.state_dict() == reference.state_dict()
    assert same_tensors([parameter], [other])
    assert all(v.isfinite().all() for v in free.state[parameter].values())


def test_sync_free_mode_refuses_optimizers_that_cannot_skip_by_themselves() -> None:
    parameter = weight()
    optimizer = torch.optim.RMSprop([parameter])
    scaler = DynamicScaler("cpu", sync_free=True)
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(ArgumentError, match="skips a step on the device with sync_free=True; got RMSprop"):
        scaler.step(optimizer)
    assert parameter.grad.tolist() == [2.0**16] * 2


@pytest.mark.parametrize("sync_free", [False, True])
def test_momentum_of_a_fused_first_step_that_was_skipped(sync_free: bool) -> None:
    parameters = [weight(*range(64)) for _ in range(8)]
    optimizer = torch.optim.SGD(parameters, lr=1.0, momentum=0.9, fused=True)
    scaler = DynamicScaler("cpu", sync_free=sync_free)
    waste = [torch.full((64,), torch.nan) for _ in range(64)]  # memory that uninitialised buffers may get
    del waste
    take(scaler, optimizer, overflows=True)
    buffers = [optimizer.state[p].get("momentum_buffer") for p in parameters]
    assert all(b is None or not b.any() for b in buffers)
    take(scaler, optimizer, overflows=False)
    assert all(torch.equal(p, torch.arange(64.0) - 0.25) for p in parameters)


def test_the_cause_names_the_parameter_as_the_optimizer_knows_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    groups = [{"params": list(part.named_parameters(prefix=str(i)))} for i, part in enumerate(model)]
    optimizer, scaler = torch.optim.SGD(groups, lr=0.1), DynamicScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[1].bias.grad.fill_(torch.nan)
    scaler.step(optimizer)
    expected = "non-finite gradients in 1 of 1 values of parameter 1 (1.bias) in group 1 of SGD"
    assert scaler.outcome == StepOutcome(stepped=False, reason=expected, scale=2.0**16)


def test_the_cause_is_the_loss_if_it_was_not_finite() -> None:
    parameter = weight()
    optimizer, scaler = torch.optim.SGD([parameter], lr=0.1), DynamicScaler("cpu")
    scaler.scale((parameter * torch.nan).sum()).backward()
    scaler.step(optimizer)
    assert scaler.outcome.reason.endswith("of SGD; the loss itself was nan, before scaling")
    scaler.update()
    take(scaler, optimizer, overflows=True)
    assert scaler.outcome.reason == "non-finite gradients in 1 of 2 values of parameter 0 in group 0 of SGD"


def test_two_optimizers_have_an_outcome_each() -> None:
    a, b = weight(), weight()
    first, second = torch.optim.SGD([a], lr=0.1), torch.optim.Adam([b], fused=True)
    scaler = DynamicScaler("cpu")
    for bad in (None, a, b):
        first.zero_grad()
        second.zero_grad()
        scaler.scale((a + b).sum()).backward()
        if bad is not None:
            bad.grad[0] = torch.inf
        scaler.step(first)
        scaler.step(second)
        assert scaler.outcome_of(first).stepped is (bad is not a)
        assert scaler.outcome_of(second).stepped is (bad is not b)
        assert scaler.outcome is scaler.outcome_of(second)
        scaler.update()
    assert scaler.get_scale() == 2.0**14
    take(scaler, first, overflows=False)
    with pytest.raises(PlimsollError, match="got Adam, which has not"):
        scaler.outcome_of(second)


def test_gradients_on_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two names of the CPU stand for two devices; the decision is one."""
    gather = step.gather

    def split(optimizer: Any, *, half: bool = True) -> Any:
        found = gather(optimizer, half=half)
        cpu = found.by_device.pop(torch.device("cpu"))
        found.by_device[torch.device("cpu")] = cpu[::2]
        found.by_device[torch.device("cpu", 1)] = cpu[1::2]
        return found

    monkeypatch.setattr("plimsoll.scaling.base.gather", split)
    for fused in (False, True):
        for bad in (0, 1, None):
            parameters = [weight(), weight()]
            optimizer, scaler = torch.optim.SGD(parameters, lr=1.0, fused=fused), DynamicScaler("cpu")
            scaler.scale(sum(p.sum() for p in parameters)).backward()
            if bad is not None:
                parameters[bad].grad[1] = torch.nan
            scaler.unscale_(optimizer)
            founds = scaler._found_inf_per_device(optimizer)
            assert [v.item() for v in founds.values()] == [float(bad == 0), float(bad == 1)]
            scaler.step(optimizer)
            assert scaler.outcome.stepped is (bad is None)
            assert all(p.tolist() == [1.0, 1.0] if bad is not None else p.tolist() == [0.0, 0.0] for p in parameters)
            scaler.update()
            assert scaler.get_scale() == (2.0**16 if bad is None else 2.0**15)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU beside the CPU")
def test_a_model_on_the_cpu_and_a_gpu() -> None:
    here, there = weight(), nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([here, there], lr=1.0), DynamicScaler("cuda")
    for bad in (None, here, there):
        optimizer.zero_grad()
        scaler.scale(here.sum().cuda() + there.sum()).backward()
        if bad is not None:
            bad.grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.outcome.stepped is (bad is None)
    assert here.tolist() == there.tolist() == [0.0, 0.0] and scaler.get_scale() == 2.0**14


class _Masters(torch.optim.SGD):
    """An optimizer that takes its gradients from elsewhere, when asked."""

    def __init__(self, model: nn.Parameter) -> None:
        super().__init__([nn.Parameter(model.detach().float())], lr=1.0)
        self.model = model
        self.asked = 0

    def collect_gradients(self) -> None:
        self.asked += 1
        self.param_groups[0]["params"][0].grad = self.model.grad.float()


@pytest.mark.parametrize("separate", [False, True])
def test_masters_are_asked_for_their_gradients_before_they_are_unscaled(separate: bool) -> None:
    low = weight(1.0, dtype=torch.float16)
    optimizer, scaler = _Masters(low), DynamicScaler("cpu", 2.0**12)
    scaler.scale(low.sum() * 2.0**-20).backward()
    if separate:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert optimizer.asked == 1
    assert optimizer.param_groups[0]["params"][0].grad.item() == 2.0**-20


def test_closures_and_lbfgs_are_refused_with_a_reason() -> None:
    parameter = weight()
    scaler, optimizer = DynamicScaler("cpu"), torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter.sum()).backward()
    for arguments in ({"closure": lambda: 0.0}, {}):
        with pytest.raises(StateError, match="step: expected no closure; got one for SGD"):
            scaler.step(optimizer, *([] if arguments else [lambda: 0.0]), **arguments)
    with pytest.raises(RuntimeError, match="got LBFGS, which evaluates the loss several times within one step"):
        scaler.step(torch.optim.LBFGS([parameter]))
    scaler.step(optimizer, closure=None)
    assert scaler.outcome.stepped


def test_calls_out_of_order_are_errors_that_leave_the_scaler_as_it_was() -> None:
    parameter = weight()
    scaler, optimizer = DynamicScaler("cpu"), torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.ones(2)
    for call in (scaler.unscale_, scaler.step):
        with pytest.raises(StateError, match=f"{call.__name__}: expected a scaled loss before it; got none"):
            call(optimizer)
    with pytest.raises(StateError, match="update: expected a scaled loss before it"):
        scaler.update()
    scaler.scale(parameter.sum()).backward()
    with pytest.raises(StateError, match="update: expected a step of some optimizer before it, or unscale_; got none"):
        scaler.update()
    scaler.unscale_(optimizer)
    unscaled = parameter.grad.clone()
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since"):
        scaler.unscale_(optimizer)
    assert torch.equal(parameter.grad, unscaled)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(StateError, match="unscale_: expected a call before the step of SGD"):
        scaler.unscale_(optimizer)
    scaler.update()
    assert scales(scaler, [False]) == [2.0**16]


class _Stored:
    """Stands for an optimizer of one parameter, with a gradient that torch would not let a plain one have."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad
        self.param_groups = [{"params": [self]}]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch says so once a process
def test_a_layout_that_cannot_be_unscaled_is_named() -> None:
    scaler = DynamicScaler("cpu")
    scaler.scale(torch.ones(1))
    rows = torch.eye(2).to_sparse_csr()
    with pytest.raises(UnsupportedTensorError, match="of layout torch.sparse_coo; got torch.sparse_csr"):
        scaler.unscale_(_Stored(rows))


def test_complex_gradients() -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), DynamicScaler("cpu")
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale(parameter.abs().square().sum()).backward()
        if bad:
            parameter.grad[1] = complex(0.0, math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(parameter, torch.full_like(parameter, -1.0)) and scaler.outcome.stepped is not bad


def test_a_static_scale_stays_and_skips() -> None:
    parameter = weight()
    scaler, optimizer = StaticScaler(1024.0, device="cpu"), torch.optim.SGD([parameter], lr=1.0)
    assert scales(scaler, [False, True, True, False], optimizer) == [1024.0] * 4
    assert parameter.tolist() == [0.5, 0.5]
    assert [o.stepped for o in outcomes(scaler, optimizer, [True, False])] == [False, True]
    with pytest.raises(ArgumentError, match="expected new_scale within the scaler's bounds, 1024 to 1024; got 8"):
        scaler.update(8.0)


@pytest.mark.parametrize(
    "scaler", [DynamicScaler("cpu", enabled=False), StaticScaler(8.0, device="cpu", enabled=False)]
)
def test_a_disabled_scaler_does_nothing_but_pass_on(scaler: Any) -> None:
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    loss = parameter.sum()
    assert scaler.scale(loss) is loss and scaler.scale([loss]) == [loss]
    loss.backward()
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0  # a closure is the optimizer's own affair
    scaler.update()
    assert scaler.outcome == scaler.outcome_of(optimizer) == StepOutcome(stepped=True, scale=1.0)
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    assert scaler._get_growth_tracker() == 0
    scaler.load_state_dict({"anything": 1})


BAD = [
    ({"init_scale": 0.0}, "DynamicScaler: expected init_scale from 2\\*\\*-126 .*; got 0.0. Use a power of two"),
    ({"init_scale": math.inf}, "expected init_scale .*got inf"),
    ({"init_scale": math.nan}, "expected init_scale .*got nan"),
    ({"init_scale": -2.0}, "expected init_scale .*got -2.0"),
    ({"init_scale": "big"}, "expected init_scale .*got 'big'"),
    ({"init_scale": None}, "expected init_scale .*got None"),
    ({"min_scale": 2.0**-127}, "expected min_scale from 2"),
    ({"max_scale": 1e39}, "expected max_scale from 2"),
    ({"init_scale": 2.0, "min_scale": 4.0}, "expected min_scale <= init_scale <= max_scale; got min_scale=4"),
    ({"init_scale": 2.0, "max_scale": 1.0}, "expected min_scale <= init_scale <= max_scale"),
    ({"growth_factor": 1.0}, "expected growth_factor to be a number above 1; got growth_factor=1.0. Use 2.0, or"),
    ({"growth_factor": math.nan}, "expected growth_factor to be a number above 1; got growth_factor=nan"),
    ({"growth_factor": math.inf}, "expected growth_factor to be a number above 1; got growth_factor=inf"),
    ({"backoff_factor": 1.0}, "backoff_factor to be a number above 0 and below 1; got backoff_factor=1.0"),
    ({"backoff_factor": 0.0}, "backoff_factor to be a number above 0 and below 1; got backoff_factor=0.0"),
    ({"growth_interval": 0}, "expected growth_interval to be an integer of at least 1; got growth_interval=0"),
    ({"growth_interval": 2.5}, "expected growth_interval to be an integer of at least 1; got growth_interval=2.5"),
    ({"growth_interval": True}, "expected growth_interval to be an integer of at least 1; got growth_interval=True"),
    ({"regrowth_interval": 0}, "expected regrowth_interval to be an integer of at least 1; got regrowth_interval=0"),
    ({"hysteresis": 0}, "expected hysteresis to be an integer of at least 1; got hysteresis=0.*or a Hysteresis"),
    ({"hysteresis": "windowed"}, "got hysteresis='windowed'. Use 1 .*, or a Hysteresis"),
]  # fmt: skip


@each(("arguments", "message"), BAD)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        DynamicScaler("cpu", **arguments)


def test_other_arguments_that_cannot_be() -> None:
    with pytest.raises(
        ArgumentError, match="Hysteresis: expected overflows to be an integer of at least 1; got .*=1.5"
    ):
        Hysteresis(overflows=1.5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="expected kind to be 'consecutive' or 'windowed'; got kind='lazy'"):
        Hysteresis(kind="lazy")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="StaticScaler: expected scale from"):
        StaticScaler(0.0, device="cpu")
    scaler = DynamicScaler("cpu")
    for call, value, message in (
        (
            scaler.set_growth_factor,
            0.5,
            "set_growth_factor: expected growth_factor to be a number above 1",
        ),
        (
            scaler.set_backoff_factor,
            2.0,
            "set_backoff_factor: expected backoff_factor to be a number above 0",
        ),
        (scaler.set_growth_interval, 0, "set_growth_interval: expected new_interval to be an integer of at least 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call(value)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert scales(scaler, [False, True]) == [2.0**18, 2.0**16]


def test_a_new_scale_is_checked() -> None:
    parameter = weight()
    scaler = DynamicScaler("cpu", max_scale=2.0**20)
    scaler.scale(parameter.sum())
    for value, message in ((0.0, "update: expected new_scale from"), (2.0**21, "within the scaler's bounds")):
        with pytest.raises(ArgumentError, match=message):
            scaler.update(value)
    with pytest.raises(ArgumentError, match="expected new_scale as a number, or a one-element tensor on cpu"):
        scaler.update(torch.ones(2))
    with pytest.raises(ArgumentError, match="got one of shape \\(1,\\) on cpu, requires_grad=True"):
        scaler.update(torch.ones(1, requires_grad=True))
    with pytest.raises(ArgumentError, match="on meta"):
        scaler.update(torch.ones(1, device="meta"))
    assert scaler.get_scale() == 2.0**16
    for given, kept in ((64, 64.0), (torch.tensor(0.0), 2.0**-14), (torch.tensor([torch.inf]), 2.0**20)):
        scaler.update(given)
        assert scaler.get_scale() == kept
    scaler.update(torch.tensor(torch.nan))
    assert scaler.get_scale() == 2.0**-14


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_cuda_the_default_device_disables_and_says_so() -> None:
    with pytest.warns(UserWarning, match="DynamicScaler: CUDA is not available, so that nothing is scaled"):
        scaler = DynamicScaler()
    assert not scaler.is_enabled()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda")], ids=str)
def test_a_constant_scale_that_is_not_used_is_said(device: str) -> None:
    with pytest.warns(UserWarning, match="^StaticScaler: CUDA is not available") as caught:
        scaler = StaticScaler(1024.0, device=device)
    (one,) = caught
    assert "the scale is 1, not 2^10. Use device='cpu'" in str(one.message) and one.filename == __file__
    assert scaler.get_scale() == 1.0
