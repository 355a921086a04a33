"""`audit` measures the scale of every tensor and gradient of one pass.

The model is as it was before, whatever the pass changes.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.rounding.casting import is_sharded
from plimsoll.unit.arguments import call_arguments, described
from plimsoll.unit.auditing.observer import Entry, Observer, spectrum_of
from plimsoll.unit.auditing.result import Audit, Row
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import leaves_of
from plimsoll.watch.names import ROOT, clean, tensors_in, unwrapped
from plimsoll.watch.session import nothing_recorded
from plimsoll.watch.shadow.replay import RandomState, borrowed, buffers_of, eagerly, fresh_inputs, tensors_of

# -- state of a model, saved before an audit and restored after it -----------------------------------------------------

# - Parameters are replaced by new leaves over the same memory, so that gradients, hooks and optimizers of the real ones
#   are not touched. Buffers are replaced by copies.
# - Attributes of each module, and its lists, dictionaries and sets, are restored.
# - The random generators of Python, NumPy and torch are restored.
# - Watches do not record. Code of torch.compile runs eagerly.

_MODULE_STATE = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def borrowed_models(roots: Iterable[nn.Module], devices: set[torch.device]) -> Generator[dict[int, nn.Parameter]]:
    """Lend the modules to an audit, and yield each parameter's leaf by its id."""
    random = RandomState(devices)
    leaves: dict[int, nn.Parameter] = {}
    copies: dict[int, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_watches())
            stack.enter_context(eagerly())  # compiled code calls no operation that can be observed
            stack.enter_context(torch.enable_grad())
            for root in roots:
                stack.enter_context(borrowed(root, {}, buffers_of(root)))
                for module in root.modules():
                    _replace_state(module, leaves, copies)
            yield leaves
    finally:
        random.restore()


def _replace_state(module: nn.Module, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> None:
    attributes = module.__dict__
    for name, p in attributes["_parameters"].items():
        if p is not None:
            attributes["_parameters"][name] = _leaf(p, leaves)
    for name, value in list(attributes.items()):
        if name not in _MODULE_STATE and type(value) in (list, dict, set):
            attributes[name] = _copied(value, leaves, copies)


def _leaf(p: nn.Parameter, leaves: dict[int, nn.Parameter]) -> nn.Parameter:
    if any(p is leaf for leaf in leaves.values()):  # replaced already: a loss that contains the model
        return p
    if id(p) not in leaves:
        leaves[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return leaves[id(p)]


def _copied(value: Any, leaves: dict[int, nn.Parameter], copies: dict[int, Any]) -> Any:
    """Return a copy of a module's container, one for all modules that share it.

    Parameters in it (as in an LSTM) are replaced by leaves.
    """
    key = id(value)
    if key not in copies:
        copied = value.copy()
        if isinstance(copied, list):
            for i, x in enumerate(cast("list[Any]", copied)):
                copied[i] = _leaf(x, leaves) if isinstance(x, nn.Parameter) else x
        copies[key] = copied
    return copies[key]


@contextlib.contextmanager
def gradients_restored(ends: Iterable[Tensor], audited: Iterable[Tensor]) -> Generator[None]:
    """Restore the gradients of leaves that these tensors reach, but the audited."""
    own = {id(x) for x in audited}
    saved = [(leaf, leaf.grad) for leaf in leaves_of(list(ends)).values() if id(leaf) not in own]
    for leaf, _ in saved:
        leaf.grad = None
    try:
        yield
    finally:
        for leaf, gradient in saved:
            leaf.grad = gradient


@contextlib.contextmanager
def _without_watches() -> Generator[None]:
    if not torch_hooks.listeners():
        yield
        return
    with nothing_recorded(), torch_hooks.exclusive(cast("Any", _NoListener())):
        yield


class _NoListener:
    """Listener that ignores every event."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing


def _nothing(*_: object) -> None:
    return


# -- audit -------------------------------------------------------------------------------------------------------------

_LOSS = "loss"


def audit(
    model: nn.Module,
    example: Tensor | tuple[Any, ...] | Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    *,
    every: bool = False,
) -> Audit:
    """Measure the scale of every operation of a forward and backward pass.

    Each operation's result, each floating-point input and each parameter is measured exactly and completely
    (`plimsoll.measure`), and so is its gradient. A module of `unit`, or a function of `unit.functional`, is one
    operation, its factors included. The model stays in its mode, training or not. It computes the same as without
    `audit`, bit for bit, except that compiled models run eagerly. Gradients, buffers, attributes of modules and random
    generators are restored, and watches record nothing.

    Args:
        model: Any module whose parameters are complete on this process.
        example: A tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        loss: Function of the model's output that returns a scalar. Default: the `loss` of the output, or the output
            itself if it is a scalar. Otherwise every floating-point output gets a gradient of random normal values.
        every: Whether operations that only move values (views, copies, joins) or make them of none get rows too.
            Default: False.

    Returns:
        The audit, with a row for each tensor.

    Raises:
        ArgumentError: The model, the example or the loss cannot be run.
        UnsupportedTensorError: A parameter has no values on this process.

    Errors of the model itself are passed on.

    >>> torch.manual_seed(0); result = audit(nn.Linear(256, 64), torch.randn(128, 256))
    <...>
    >>> [(row.name, round(row.forward_std, 2), round(row.backward_std, 2)) for row in result.operations]
    [('model linear', 0.58, 1.0)]
    """
    root = _checked(model, loss)
    args, kwargs = call_arguments("audit", example)
    roots = [root, *([loss] if isinstance(loss, nn.Module) else [])]
    observer = Observer(_run.__code__)
    devices = {x.device for module in roots for x in module.parameters()}
    inputs = cast("tuple[tuple[Any, ...], dict[str, Any]]", fresh_inputs((args, kwargs), None))
    devices |= {x.device for x in tensors_of(inputs)}
    parameters = list(root.named_parameters())
    with borrowed_models(roots, devices) as leaves:
        entries = [observer.take(name.removeprefix(".") or "input", x) for name, x in tensors_in(_as_one(*inputs))]
        names = _module_names(root, loss)
        _run(observer, root, inputs, loss)
        own = [(clean(name), leaves[id(p)]) for name, p in parameters]
        rows = _rows(observer.entries, len(entries), names, has_loss=loss is not None)
        rows += _parameter_rows(own, len(rows))
    shown = [row for row in rows if every or not row.moved]
    return Audit(
        model=type(root).__name__, rows=tuple(shown), training=root.training, unmeasured=tuple(observer.unmeasured)
    )


def _run(observer: Observer, root: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]], loss: Any) -> None:
    with observer.listening():
        output = root(*inputs[0], **inputs[1])
        value = None if loss is None else _scalar(loss(output))
    ends = _ends(output) if value is None else [(value, None)]
    trained = [(x, g) for x, g in ends if x.requires_grad]
    if not trained:
        return
    tensors = [x for x, _ in trained]
    with gradients_restored(tensors, root.parameters()):
        torch.autograd.backward(tensors, [g for _, g in trained])


def _ends(output: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Return the starts of a backward pass without a loss, with their gradients."""
    for end in cast("tuple[Any, ...]", (_own_loss(output), output)):
        if isinstance(end, Tensor) and end.numel() == 1 and end.is_floating_point():
            return [(end, None)]
    outputs = [x for _, x in tensors_in(output)]
    if not outputs:
        raise ArgumentError(
            f"audit: expected a model that gives a floating tensor; got {type(output).__name__}. Give a loss that "
            "makes a scalar of it."
        )
    return [(x, _normal(x, number)) for number, x in enumerate(outputs)]


def _own_loss(output: Any) -> Any:
    """Return the loss within an output, as in models of transformers."""
    return (
        cast("Mapping[str, Any]", output).get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    )


def _scalar(value: Any) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point():
        return value
    raise ArgumentError(
        f"audit: expected loss to return a floating scalar; got {described(value)}. Reduce it: loss.mean(), or "
        "output['loss']."
    )


def _normal(x: Tensor, number: int) -> Tensor:
    """Return random normal values for a gradient, from a separate generator."""
    generator = torch.Generator("cpu").manual_seed(number)
    drawn = torch.randn(x.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(device=x.device, dtype=x.dtype)


def _rows(entries: Sequence[Entry], inputs: int, names: Mapping[int, str], *, has_loss: bool) -> list[Row]:
    calls: dict[tuple[str, str, int, bool], int] = {}
    rows: list[Row] = []
    for position, entry in enumerate(entries):
        assert entry.forward is not None
        module = names.get(id(entry.site.module))
        if module is None:
            inside = entry.site.module
            module = type(inside).__name__ if inside is not None else _LOSS if has_loss else ROOT
        kind = "input" if position < inputs else "operation"
        module = ROOT if kind == "input" else module
        key = (module, entry.operation, entry.output, entry.moved)
        calls[key] = calls.get(key, -1) + 1
        rows.append(
            Row(
                position=position,
                kind=kind,
                operation=entry.operation,
                module=module,
                call=calls[key],
                output=entry.output,
                source=entry.site.source,
                shape=entry.shape,
                dtype=_name(entry.dtype),
                moved=entry.moved,
                forward=entry.forward,
                backward=entry.backward,
                absence=entry.absence,
            )
        )
    return rows


def _parameter_rows(parameters: Sequence[tuple[str, Tensor]], position: int) -> Iterator[Row]:
    for number, (name, leaf) in enumerate(parameters):
        module, _, own = name.rpartition(".")
        forward = spectrum_of(leaf)
        if forward is None:
            continue
        yield Row(
            position=position + number,
            kind="parameter",
            operation=own,
            module=module or ROOT,
            shape=tuple(leaf.shape),
            dtype=_name(leaf.dtype),
            forward=forward,
            backward=None if leaf.grad is None else spectrum_of(leaf.grad),
            absence=None if leaf.grad is not None else "never came" if leaf.requires_grad else "frozen",
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _module_names(root: nn.Module, loss: object) -> dict[int, str]:
    """Return each module's first path, by the module's id."""
    paths: dict[int, str] = {}
    for name, module in cast("Iterator[tuple[str, nn.Module]]", root.named_modules()):
        paths.setdefault(id(module), clean(name) or ROOT)
    if isinstance(loss, nn.Module):
        for name, module in cast("Iterator[tuple[str, nn.Module]]", loss.named_modules()):
            paths.setdefault(id(module), f"{_LOSS}.{name}" if name else _LOSS)
    return paths


def _as_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs or (args[0] if len(args) == 1 else args)


def _checked(model: object, loss: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"audit: expected a torch.nn.Module; got {type(model).__name__}. Give the model itself.")
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentError(
            "audit: expected a module that runs in Python; got a TorchScript one, whose operations cannot be seen. "
            "Give the module that it was made from."
        )
    if loss is not None and not callable(loss):
        raise ArgumentError(
            f"audit: expected loss to be None or a function of the model's output; got {type(loss).__name__}. Write "
            "loss=lambda output: ... ."
        )
    if torch.is_inference_mode_enabled():
        raise ArgumentError(
            "audit: expected a place where gradients can be computed; got torch.inference_mode. Call it outside."
        )
    root = unwrapped(model)
    for name, p in root.named_parameters():
        _check_parameter(name, p)
    return root


def _check_parameter(name: str, p: Tensor) -> None:
    if nn.parameter.is_lazy(p):
        problem, advice = "one that is not initialized yet", "Run a batch through the model first."
    elif p.is_meta:
        problem = "one on the meta device, without values"
        advice = "Materialize it with model.to_empty(device=...), and draw it."
    elif is_sharded(p):
        problem, advice = "a DTensor, of which a part is elsewhere", "Audit the model before it is sharded."
    else:
        return
    raise UnsupportedTensorError(
        f"audit: expected parameters with their values here; got {name!r}, {problem}. {advice}"
    )
