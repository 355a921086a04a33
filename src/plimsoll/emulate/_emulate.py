"""`emulate`: training as on hardware that this machine is not."""

import contextlib
import sys
import threading
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from plimsoll.emulate import _contexts, _frames, _wide
from plimsoll.emulate._attention import Attention
from plimsoll.emulate._autocast import casting, mha_in_python
from plimsoll.emulate._convolutions import Convolutions
from plimsoll.emulate._counts import Counts, Operations
from plimsoll.emulate._frames import Frame, Rule
from plimsoll.emulate._lists import CUDA, OperationLists, operation_name
from plimsoll.emulate._products import Products
from plimsoll.emulate._recipe import Recipe, recipe
from plimsoll.emulate._recurrent import lstm
from plimsoll.emulate._rounded import Everywhere, Rounded, within
from plimsoll.errors import ArgumentError
from plimsoll.formats import get

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

# Operations that are made of products, and never round by themselves.
_MADE_OF_PRODUCTS = (
    "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "einsum",
    "gru", "gru_cell", "inner", "linalg_multi_dot", "linalg_vecdot", "lstm_cell", "rnn_relu", "rnn_relu_cell",
    "rnn_tanh", "rnn_tanh_cell", "tensordot",
)  # fmt: skip


def emulate(
    precision: str | torch.dtype | None = None,
    *,
    forward: object | None = None,
    backward: object | None = None,
    operations: str | Iterable[object] = "matmul",
    accumulate: object = "fp32",
    chunk: int = 1,
    lists: OperationLists | None = CUDA,
    **cast_arguments: Any,
) -> "Emulation":
    """A context in which operations compute as other hardware would, forward and backward.

    ``emulate("fp16")`` and ``emulate("bf16")``: a GPU's 16-bit numerics on torch's own 16-bit tensors. Operations are
    cast as `torch.autocast("cuda")` casts them (`lists`; None casts nothing, for a model that is 16-bit itself), and
    matrix products and convolutions compute in FP32 and round once to the 16-bit dtype, as tensor cores do, at close to
    the speed of FP32. ``emulate("fp32")`` is a region without emulation inside another.

    ``emulate(forward="e4m3", backward="e5m2")``: the operands of products are rounded to formats that the machine
    lacks, weights and activations to `forward`, gradients to `backward`; the tensors stay in their dtype. With a
    precision too, everything else is as there: ``emulate("bf16", forward="e4m3", backward="e5m2")``.

    A backward of what was recorded inside computes likewise, also after the context has ended. It holds for the thread
    that opened it. Nothing is left behind. Code of torch.compile runs eagerly inside.

    Args:
        precision: "fp16", "bf16" or "fp32".
        forward: any format, block formats too; None leaves the direction as it is. Blocks run along the axis that a
            product sums over.
        backward: likewise, for gradients.
        operations: where formats act. "matmul": at the operands of every product, convolution, and of attention. A name
            or several: of those products alone; the results of other operations that are named are rounded, and the
            gradients that come back to them. "all": the operands of products, and the result of every operation.
        accumulate: the format that products are summed in: "fp32", or any other, to see what it loses: slow.
        chunk: with such an accumulator, so many neighbouring products are added exactly before they are added to it
            and the sum is rounded; in order, from the first to the last.
        lists: what a 16-bit precision casts, and to what; None: nothing.
        cast_arguments: rounding, saturate, scale, scale_rule and generator of `plimsoll.cast`.

    Raises `ArgumentError`, and `FormatError` for a format that does not exist.

    >>> import plimsoll as pl
    >>> x = torch.full((1, 4096), 0.1)
    >>> with pl.emulate("fp16") as e:
    ...     y = x @ x.T
    >>> y.item(), y.dtype, e.operations.emulated
    (40.9375, torch.float16, {'matmul': 1})
    >>> with pl.emulate("fp16", accumulate="fp16"):  # from 32 on, FP16 cannot add 0.01 any more
    ...     (x @ x.T).item()
    32.0
    """
    low = _dtype(precision)
    found = recipe(forward, backward, accumulate, chunk, cast_arguments)
    if low is None and found is None:
        raise ArgumentError(
            "emulate: expected a precision, a format or an accumulator; got none. Write emulate('fp16'), or "
            "emulate(forward='e4m3', backward='e5m2')."
        )
    if lists is not CUDA and low in (None, torch.float32):
        raise ArgumentError(
            "emulate: expected lists with precision 'fp16' or 'bf16', which they cast to; got "
            f"precision={precision!r}. Name one, or leave lists out."
        )
    names = _selection(operations, found)
    return Emulation(low=low, recipe=found, operations=names, lists=lists)


class Emulation(contextlib.ContextDecorator):
    """What `emulate` gives: a context, re-entrant, and a decorator. `operations` says what ran in all its uses."""

    def __init__(
        self,
        *,
        low: torch.dtype | None,
        recipe: Recipe | None,
        operations: "str | frozenset[str]",
        lists: OperationLists | None,
    ) -> None:
        self._low, self._recipe, self._selected, self._lists = low, recipe, operations, lists
        self._rules = _rules(low, recipe, operations)
        self._counts = Counts()
        self._open = threading.local()

    @property
    def operations(self) -> Operations:
        """How often each operation ran inside: which were emulated, and which ran on torch's own 16-bit kernels."""
        return self._counts.total()

    def __enter__(self) -> "Emulation":
        stack: list[contextlib.AbstractContextManager[object]] = self._open.__dict__.setdefault("stack", [])
        context = self._context()
        context.__enter__()
        stack.append(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.stack.pop().__exit__(kind, error, trace)

    @contextlib.contextmanager
    def _context(self) -> Generator[None]:
        around = _frames.current() or Frame()
        rules = {} if self._low is torch.float32 and self._recipe is None else {**around.rules, **self._rules}
        with contextlib.ExitStack() as stack:
            eager = stack.enter_context(_eagerly())
            frame = replace(around, rules=rules, witness=self._witness(), eager=eager)
            stack.enter_context(mha_in_python())
            stack.enter_context(_contexts.entered(frame))
            if self._low is not None:
                lists = None if self._low is torch.float32 else self._lists
                stack.enter_context(casting(lists, self._low))
            yield

    def _witness(self) -> _frames.Witness:
        if self._recipe is not None and self._selected == "all":
            return Everywhere(self._counts, Rounded(self._recipe))
        return self._counts


def _rules(low: torch.dtype | None, recipe: Recipe | None, selected: "str | frozenset[str]") -> dict[str, Rule]:
    found: dict[str, Rule] = {} if low in (None, torch.float32) else _wide.rules()
    if recipe is None:
        return found
    products = _product_rules(recipe)
    rounded = Rounded(recipe)
    if selected == "all":
        return found | {name: rounded.after(rule) for name, rule in products.items()}
    if isinstance(selected, str):
        return _without_wholes(found) | products
    for name in selected:
        found |= _selected_rules(name, products, rounded)
    return found


def _without_wholes(rules: dict[str, Rule]) -> dict[str, Rule]:
    """The rules, but for operations that are made of products which rules apply to."""
    return {name: rule for name, rule in rules.items() if name not in _MADE_OF_PRODUCTS}


def _product_rules(recipe: Recipe) -> dict[str, Rule]:
    products = Products(recipe)
    found = products.rules() | Convolutions(recipe).rules()
    found |= {"scaled_dot_product_attention": Attention(products), "lstm": lstm}
    return {name: _frames.in_forward(rule) for name, rule in found.items()}


def _selected_rules(name: str, products: Mapping[str, Rule], rounded: Rounded) -> dict[str, Rule]:
    if name in _MADE_OF_PRODUCTS or name == "lstm":
        return {name: within(products)}
    if name in products:
        return {name: products[name]}
    rule = _frames.in_forward(rounded.alone)
    return {name: rule} | ({f"{name}_": rule} if hasattr(torch.ops.aten, f"{name}_") else {})


def _selection(operations: str | Iterable[object], recipe: Recipe | None) -> "str | frozenset[str]":
    if isinstance(operations, str) and operations in ("matmul", "all"):
        selected: str | frozenset[str] = operations
    else:
        given = (operations,) if isinstance(operations, str) or callable(operations) else operations
        selected = frozenset(operation_name(one, "emulate") for one in given)
    if selected != "matmul" and (recipe is None or (recipe.forward is None and recipe.backward is None)):
        raise ArgumentError(
            f"emulate: expected operations with a forward or a backward format; got operations={operations!r} and "
            "neither. Name a format, or leave operations out."
        )
    return selected


def _dtype(precision: str | torch.dtype | None) -> torch.dtype | None:
    if precision is None:
        return None
    name = get(precision).name
    if name not in _DTYPES:
        raise ArgumentError(
            f"emulate: expected precision to be one of {', '.join(_DTYPES)}; got {precision!r}. A format that torch "
            f"has no arithmetic for goes to forward= and backward=: emulate(forward={name!r}, ...)."
        )
    return _DTYPES[name]


@contextlib.contextmanager
def _eagerly() -> Generator[bool]:
    """Compiled code runs eagerly: its kernels were generated without the emulation. Gives whether that was arranged.

    Where the compiler is not loaded there is no such code yet, and loading it takes seconds: then frames refuse.
    """
    if "torch._dynamo" not in sys.modules:
        yield False
        return
    with torch.compiler.set_stance("force_eager"):
        yield True
