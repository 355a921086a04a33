"""Graph of a model, captured by `torch.export` as it trains."""

import inspect
import logging
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit.arguments import call_arguments

TORCH = str(Path(torch.__file__).parent) + os.sep  # where its own code begins


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """Graph of a model, with the call that it was captured from."""

    program: torch.export.ExportedProgram  # result of `torch.export`
    training: bool  # whether the model was in training mode
    args: tuple[Any, ...]  # positional arguments of the call
    kwargs: Mapping[str, Any]  # keyword arguments of the call
    strict: bool  # whether the bytecode was analyzed, because running the model's own code failed
    ties: tuple[tuple[str, ...], ...]  # groups of names of one shared parameter, in the model's order

    @property
    def graph(self) -> torch.fx.Graph:
        """Captured graph."""
        return self.program.graph

    @property
    def parameters(self) -> dict[str, str]:
        """Name in the model of each parameter, by its placeholder in the graph."""
        return dict(self.program.graph_signature.inputs_to_parameters)

    @property
    def buffers(self) -> dict[str, str]:
        """Name in the model of each buffer, by its placeholder in the graph."""
        return dict(self.program.graph_signature.inputs_to_buffers)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Placeholders of the model's inputs, in their order."""
        return tuple(str(name) for name in self.program.graph_signature.user_inputs if name is not None)


def capture(model: nn.Module, example: object, *, training: bool = True, operation: str = "convert") -> Captured:
    """Return the graph of `model` called with `example`, with open sizes.

    All sizes of tensors are open if the model, on any device, allows it. The model does not change: its training flags,
    buffers, gradients and random state are restored. Errors are those of `operation`. They name the line if the graph
    cannot be captured: its control flow depends on data, its batch is fixed, or torch.export does not support an
    operation.
    """
    if not isinstance(cast("object", model), nn.Module):
        raise ArgumentError(
            f"{operation}: expected an nn.Module; got {type(model).__name__}. Give the model that would be trained."
        )
    args, kwargs = _copied(model, call_arguments(operation, example))
    batch = _batch(args, kwargs, operation)
    with _mode(model, training), _quiet(), _no_hook_left():
        program, strict = _export(model, args, kwargs, operation)
    _check_batch(program, batch, model, operation)
    _check_sizes(program, operation)
    return Captured(program=program, training=training, args=args, kwargs=kwargs, strict=strict, ties=_ties(model))


def _copied(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy each tensor of a call: export takes two with the same memory for one input.

    The copies are on the meta device if the model is.
    """
    meta = any(parameter.is_meta for parameter in model.parameters())

    def copy(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        return leaf.detach().to("meta") if meta else leaf.detach().clone()

    return cast("tuple[tuple[Any, ...], dict[str, Any]]", pytree.tree_map(copy, call))


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any], operation: str) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    shaped = [tensor for tensor in tensors if tensor.dim()]
    if not shaped:
        raise ArgumentError(
            f"{operation}: expected an example with a tensor that has a batch dimension; got {len(tensors)} tensors, "
            "none with a dimension. Give a batch as the model trains on it."
        )
    for tensor in shaped:
        if tensor.layout is not torch.strided:
            raise UnsupportedTensorError(
                f"{operation}: expected an example of dense tensors; got one of layout {tensor.layout} "
                f"({tensor.dtype}, {tuple(tensor.shape)}). Convert it with .to_dense()."
            )
    if shaped[0].shape[0] < 2:
        raise ArgumentError(
            f"{operation}: expected an example whose first tensor has a batch of at least 2; got shape "
            f"{tuple(shaped[0].shape)}. Torch.export takes a size of 1 for a constant: repeat the row."
        )
    return shaped[0].shape[0]


@contextmanager
def _mode(model: nn.Module, training: bool) -> Generator[None]:
    flags = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _quiet() -> Generator[None]:
    """Silence torch.export's log of failures. The last failure is raised."""
    logger = logging.getLogger("torch.export")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _no_hook_left() -> Generator[None]:
    """Remove the hook on buffers that torch 2.9 leaves if an export fails."""
    hooks: dict[int, Any] = vars(torch.nn.modules.module)["_global_buffer_registration_hooks"]
    before = set(hooks)
    try:
        yield
    finally:
        for key in hooks.keys() - before:
            del hooks[key]


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], operation: str
) -> tuple[torch.export.ExportedProgram, bool]:
    shapes = _open_shapes(model, args, kwargs, operation)
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False), False
    except Exception as first:  # noqa: BLE001  (torch.export has no base class for its errors)
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=True), True
        except Exception:  # noqa: BLE001  (the first failure names the model's line, the second the analyzer's)
            raise _refusal(first, model, operation) from first


# The captured program is only read: the conversion builds ordinary modules from it. Sizes stay open (`Dim.AUTO`), so
# that a factor that depends on the batch differs from a constant.
def _open_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], operation: str) -> dict[str, Any]:
    signature = inspect.signature(model.forward).parameters
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise ArgumentError(
            f"{operation}: expected an example that {type(model).__name__} can be called with; got {error}. Its "
            f"arguments are {', '.join(signature)}."
        ) from error

    def opened(leaf: object) -> object:
        return [torch.export.Dim.AUTO] * leaf.dim() if isinstance(leaf, Tensor) else None

    shapes: dict[str, Any] = {}
    for name, value in bound.items():
        if signature[name].kind is inspect.Parameter.VAR_KEYWORD:
            shapes |= {key: pytree.tree_map(opened, part) for key, part in value.items()}
        else:
            shapes[name] = pytree.tree_map(opened, value)
    return shapes


def _refusal(error: BaseException, model: nn.Module, operation: str) -> ArgumentError:
    names = {id(module): str(name) for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules())}
    place = _place(error.__traceback__, names)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(". ") + "."
    if "data-dependent" in str(error) or "DataDependent" in type(error).__name__:
        return ArgumentError(
            f"{operation}: expected a model whose control flow does not depend on the values of tensors; got a branch "
            f"on data{place}: {reason} Write it with torch.where, or convert the modules on both sides of it."
        )
    return ArgumentError(
        f"{operation}: expected a model whose graph torch.export can capture; got {type(error).__name__}{place}: "
        f"{reason} Change that line, or convert the parts of the model that can be captured."
    )


def _place(trace: TracebackType | None, names: Mapping[int, str]) -> str:
    """Return the module, and the last line of the model's own code, before an error."""
    line, module = "", None
    while trace is not None:
        frame = trace.tb_frame
        own = frame.f_locals.get("self")
        if isinstance(own, nn.Module) and id(own) in names:
            module = names[id(own)]
        if module is not None and not _in_torch(frame):
            line = f"{frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if module is None:
        return ""
    where = f"module '{module}'" if module else "the root module"
    return f" in {where} at {line}" if line else f" in {where}"


def _in_torch(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_filename == __file__


def _check_batch(program: torch.export.ExportedProgram, batch: int, model: nn.Module, operation: str) -> None:
    own = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or node.name not in own or not isinstance(value, Tensor) or not value.dim():
            continue
        size: Any = value.shape[0]
        if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:  # a symbol may be fixed too
            raise ArgumentError(
                f"{operation}: expected a model that takes any batch size; got {type(model).__name__}, which takes "
                f"only {batch} rows of '{node.name}'. Write sizes from the input's shape: x.view(x.shape[0], -1)."
            )
        return


def _check_sizes(program: torch.export.ExportedProgram, operation: str) -> None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # after the capture, which imports it

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and free_unbacked_symbols(value):
            trace = str(node.meta.get("stack_trace") or "").strip().splitlines()
            line = f"`{trace[-1].strip()}`" if trace else node.name
            raise ArgumentError(
                f"{operation}: expected sizes that follow from those of the inputs; got {line}, whose result's size "
                "depends on values. Keep the size, for example with torch.where or a mask that multiplies."
            )


def _ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
