"""What layer scales cannot be right for is refused, with what to do; and nothing is left behind."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import ArgumentError, StateError, UnsupportedTensorError
from plimsoll.scaling import LayerScaler
from plimsoll.scaling.layerwise import scaled_modules
from tests.scaling.test_layers_exact import assert_equal, gradients, inputs, loss_of, with_exponents
from tests.support.cases import each
from tests.support.scaling.layer_models import Gated, Written, linears, made, needs_wide_gradients, parts

APPLY = torch.autograd.Function.__dict__["apply"]


@pytest.fixture(autouse=True)
def torch_is_as_it_was() -> Any:
    yield
    assert torch.autograd.Function.__dict__["apply"] is APPLY
    assert torch._C._len_torch_function_stack() == 0


def scaled(model: nn.Module) -> LayerScaler:
    scaler = LayerScaler(model)
    with_exponents(scaler, 0)
    return scaler


def compiled_whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_whole_graph(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager", fullgraph=True)


def compiled_in_place(model: nn.Module) -> Any:
    model[0].compile(backend="eager")
    return model


@each("compiled", [compiled_whole, compiled_whole_graph, compiled_in_place])
def test_a_model_that_is_compiled_afterwards(compiled: Any) -> None:
    torch._dynamo.reset()
    model = made("sequential")
    scaled(model)
    with pytest.raises(Exception, match="LayerScaler: expected a model that runs eagerly|Observed exception") as caught:
        compiled(model)(inputs())
    assert isinstance(caught.value, StateError) or compiled is compiled_whole_graph


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's compiler reads it
def test_a_compiled_function_within_the_forward() -> None:
    torch._dynamo.reset()
    function = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")
    model = Written(lambda m, x: function(m.a(x)), **linears(1))
    scaled(model)
    with pytest.raises(StateError, match="got one under torch.compile"):
        model(inputs())


def test_a_model_that_was_compiled_before() -> None:
    with pytest.raises(ArgumentError, match="got model, compiled by torch.compile"):
        LayerScaler(torch.compile(made("sequential"), backend="eager"))
    model = made("sequential")
    model[0].compile(backend="eager")
    with pytest.raises(ArgumentError, match="got 0, compiled by torch.compile"):
        LayerScaler(model)


def test_second_derivatives_and_what_to_do_about_them() -> None:
    def penalty(model: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
        with sdpa_kernel(SDPBackend.MATH):  # from torch 2.15 on the other ones have no second derivative on a CPU
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return gradients(model, x)

    x = inputs()
    expected = penalty(made("attention"), x)
    model, x = made("attention"), inputs()
    scaler = scaled(model)
    with pytest.raises(StateError, match="expected a backward without create_graph=True"):
        penalty(model, x)
    model.zero_grad()
    with scaler.suspended():
        assert_equal(penalty(model, inputs()), expected)


def test_a_derivative_within_the_forward() -> None:
    model = Written(lambda m, x: torch.autograd.grad(m.a(x).sum(), x)[0] + m.b(x), **linears(2))
    scaled(model)
    with pytest.raises(StateError, match="a forward without torch.autograd.grad in it"):
        model(inputs())


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.vjp], ids=lambda f: f.__name__)
def test_function_transforms(transform: Any) -> None:
    model = Written(
        lambda m, x: torch.func.vmap(m.a)(x) if transform is torch.func.vmap else torch.func.vjp(m.a, x)[0],
        **linears(1),
    )
    scaled(model)
    with pytest.raises(StateError, match="without torch.func transforms"):
        model(inputs())


def leaking(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    m.kept = m.store(m.b(h).square().mean())
    return m.c(h)


def test_a_tensor_that_leaves_otherwise_is_refused_and_released() -> None:
    def total(model: Any, x: Tensor) -> Tensor:
        return model(x).mean() + model.kept

    plain, x = Written(leaking, store=lambda t: t, **linears(3)), inputs()
    torch.manual_seed(0)
    state = plain.state_dict()
    total(plain, x).backward()
    expected = gradients(plain, x)
    model, x = Written(leaking, store=lambda t: t, **linears(3)), inputs()
    model.load_state_dict(state)
    scaler = scaled(model)
    with pytest.raises(StateError, match=r"a tensor that left the model otherwise, .* scale 2\*\*-?\d+ \(b\) too"):
        scaler.scale(total(model, x))
    model.store = scaler.release
    scaler.scale(total(model, x)).backward()
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)


def test_a_tensor_that_was_kept_and_comes_back_is_right() -> None:
    """A hidden state kept on the module, written to outside of any forward, and used in the next one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.kept = m.a(x) if m.kept is None else m.b(m.kept) * m.c(x)
        return m.kept

    def run(model: Any, x: Tensor, scaler: Any) -> dict[str, Tensor | None]:
        model(x)
        model.kept *= 3.0
        loss = model(x).mean()
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
        return gradients(model, x)

    torch.manual_seed(0)
    plain = Written(forward, kept=None, **linears(3))
    model = copy.deepcopy(plain)
    expected = run(plain, inputs(), None)
    assert_equal(run(model, inputs(), scaled(model)), expected)


def test_a_tensor_that_was_kept_and_got_other_values_outside() -> None:
    """Its mark speaks of what it held before: the graph says that two scales meet there."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.kept = m.a(x) if m.kept is None else m.b(m.kept) * m.c(x)
        return m.c(m.kept)

    model = Written(forward, kept=None, **linears(3))
    scaled(model)
    model(inputs().detach())
    model.kept.copy_(inputs() * 3.0)
    with pytest.raises(StateError, match=r"made by CopyBackwards, behind which .* 2\*\*0 \(outside of any module"):
        model(inputs().detach())


def hidden_sum(x: Tensor, y: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return x + y


def test_an_operation_that_torch_hides_is_found_in_the_graph() -> None:
    model = Written(lambda m, x: m.c(hidden_sum(m.a(x), m.a(x) * 2)), **linears(3))
    twin = copy.deepcopy(model)
    x = inputs()
    loss_of(twin(x)).backward()
    expected, x = gradients(twin, x), inputs()
    scaler = scaled(model)
    scaler.scale(loss_of(model(x))).backward()  # all of one scale: known from the graph
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)
    torn = Written(lambda m, x: m.c(hidden_sum(m.a(x), m.b(x))), **linears(3))
    scaled(torn)
    with pytest.raises(StateError, match=r"made by AddBackward0, behind which .* \([ab]\), .* \([ab]\) meet"):
        torn(inputs())


class ForeignCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint of someone else's."""

    @staticmethod
    def forward(ctx: Any, run: Any, x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, g)
        return None, x.grad


def test_someone_elses_checkpoint() -> None:
    model = Written(lambda m, x: ForeignCheckpoint.apply(m.b, m.a(x)), **linears(2))
    scaler = scaled(model)
    loss = scaler.scale(loss_of(model(inputs())))
    with pytest.raises(StateError, match="activation checkpointing by torch.utils.checkpoint; got a Linear"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_whole_model(reentrant: bool) -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        return loss_of(checkpoint(model, x, use_reentrant=reentrant))

    x = inputs()
    plain = made("residual")
    run(plain, x).backward()
    expected, x = gradients(plain, x), inputs()
    model = made("residual")
    scaler = scaled(model)
    scaler.scale(run(model, x)).backward()
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)


def test_a_write_that_autograd_could_not_follow() -> None:
    """A view of a tensor that was brought to another scale: written to, the tensor itself would not know."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        view = Gated.apply(h, m.scale).view(-1)
        view.mul_(2.0)
        return m.b(h)

    model = Written(forward, **parts())
    scaled(model)
    model(inputs())  # the function's result is a tensor of its own
    outputs = Written(lambda m, x: (h := m.a(x), h[0]), **linears(1))
    scaled(outputs)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        outputs(inputs())[0].mul_(2.0)


def test_what_a_model_returns_may_be_written_to() -> None:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        out.mul_(0.5)
        out /= 3.0
        return loss_of(out)

    x = inputs()
    plain = made("branching")
    run(plain, x).backward()
    expected, x = gradients(plain, x), inputs()
    model = made("branching")
    scaler = scaled(model)
    scaler.scale(run(model, x)).backward()
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)


def test_a_forward_that_raises_leaves_nothing_active() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        if m.fails:
            raise ValueError("on purpose")
        return m.b(h)

    model = Written(forward, fails=True, **linears(2))
    scaler = scaled(model)
    with pytest.raises(ValueError, match="on purpose"):
        model(inputs())
    assert torch._C._len_torch_function_stack() == 0
    model.fails = False
    scaler.scale(model(inputs()).mean()).backward()
    assert model.a.weight.grad is not None


def test_a_submodule_called_by_itself_is_a_model() -> None:
    x = inputs()
    plain = made("shared block")
    loss_of(plain.block(x)).backward()
    expected, x = gradients(plain, x), inputs()
    model = made("shared block")
    scaler = scaled(model)
    scaler.scale(loss_of(model.block(x))).backward()
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)


def test_two_models_one_within_the_others_forward() -> None:
    critic, model = Written(lambda m, x: m.a(m.b(x)), **linears(2)), Written(lambda m, x: m.a(m.b(x)), **linears(2))
    model.critic = [critic]
    model._forward_function = lambda m, x: m.critic[0](m.a(x)) + m.b(x)
    twins = copy.deepcopy([critic, model])
    twins[1].critic = [twins[0]]
    x = inputs()
    loss_of(twins[1](x)).backward()
    expected, x = gradients(twins[1], x), inputs()
    scaler, _ = scaled(model), scaled(critic)
    scaler.scale(loss_of(model(x))).backward()
    scaler.unscale_(torch.optim.SGD([*model.parameters(), x], lr=0.0))
    assert_equal(gradients(model, x), expected)


def test_one_scaler_for_each_model() -> None:
    model = made("sequential")
    first = LayerScaler(model)
    with pytest.raises(ArgumentError, match="a Sequential that another LayerScaler scales"):
        LayerScaler(model)
    first.close()
    LayerScaler(model).close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_copies_of_the_model_have_no_scales_and_the_scaler_has_no_copies() -> None:
    model = made("sequential")
    scaler = scaled(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss = twin(inputs())
        loss.sum().backward()
        assert "Shift" not in type(loss.grad_fn).__name__ and "Leave" not in type(loss.grad_fn).__name__
    with pytest.raises(StateError, match="expected state_dict\\(\\) to be saved"):
        pickle.dumps(scaler)


def test_outputs_can_be_pickled() -> None:
    model = made("sequential")
    scaled(model)
    out = model(inputs()).detach()
    assert torch.equal(pickle.loads(pickle.dumps(out)), out)


def test_evaluation_is_left_alone() -> None:
    model = made("glue").eval()
    scaled(model)
    with torch.no_grad():
        out = model(inputs())
    assert out.grad_fn is None
    assert torch.equal(out, made("glue").eval()(inputs()))


@needs_wide_gradients
def test_a_disabled_scaler_does_nothing() -> None:
    model = made("sequential").half()
    scaler = LayerScaler(model, enabled=False)
    assert not model._forward_hooks and model[0].weight.grad_dtype is torch.float16
    loss = model(inputs().half()).sum()
    assert scaler.scale(loss) is loss
    assert scaler.release(loss) is loss
    scaler.update()
    assert scaler.state_dict() == {}


@needs_wide_gradients
def test_closing_gives_float16_gradients_back() -> None:
    model = made("sequential").half()
    scaler = LayerScaler(model)
    scaler.scale(model(inputs().detach().half()).sum()).backward()
    assert model[0].weight.grad.dtype is torch.float32
    scaler.close()
    assert model[0].weight.grad.dtype is torch.float16 and model[0].weight.grad_dtype is torch.float16


def test_a_torch_without_wide_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaled_modules, "WIDENS", False)
    LayerScaler(made("sequential"))
    with pytest.raises(UnsupportedTensorError, match="got 0.weight \\(torch.float16\\).* or use torch 2.10 or newer"):
        LayerScaler(made("sequential").half())


@each("scale", [0.0, -8.0, 3.0, float("inf"), float("nan")])
def test_scales_that_are_no_powers_of_two_are_refused(scale: float) -> None:
    scaler = LayerScaler(made("sequential"))
    name = next(iter(scaler.scales))
    with pytest.raises(ArgumentError, match="begin_with: expected powers of two"):
        scaler.begin_with({name: scale})


@pytest.mark.skipif(not scaled_modules.WIDENS, reason="torch 2.10 and newer widen gradients")
def test_a_scaler_that_is_off_or_closed_leaves_the_gradients_dtypes_alone() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 1)).half()
    LayerScaler(model, enabled=False).begin_with({"0": 2.0**10})
    assert model[0].weight.grad_dtype is torch.float16
    scaler = LayerScaler(model)
    scaler.close()
    scaler.begin_with({"0": 2.0**10})
    assert model[0].weight.grad_dtype is torch.float16


@each("scale", ["8", None, 3.0, float("inf")])
def test_scales_to_begin_with_are_powers_of_two(scale: Any) -> None:
    scaler = LayerScaler(nn.Sequential(nn.Linear(2, 1)))
    with pytest.raises(ArgumentError, match=r"begin_with: expected powers of two; got .* for 0\."):
        scaler.begin_with({"0": scale})
    with pytest.raises(ArgumentError, match=r"^LayerScaler: expected a torch.nn.Module; got int"):
        LayerScaler(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"expected a signed format within float32's range; got fmt=e8m0"):
        LayerScaler(nn.Linear(2, 1), fmt="e8m0")
    with pytest.raises(ArgumentError, match="expected units as a function of a name and a module; got 3"):
        LayerScaler(nn.Linear(2, 1), units=3)  # type: ignore[arg-type]
