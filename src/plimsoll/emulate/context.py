"""`Emulation`: the context in which operations compute as other hardware would."""

import contextlib
import sys
from collections.abc import Generator, Mapping
from dataclasses import replace

import torch

from plimsoll.emulate.autocast import Reentrant, casting, mha_in_python
from plimsoll.emulate.casting import OperationLists
from plimsoll.emulate.dispatch import frame_entry, thread_frame
from plimsoll.emulate.dispatch.thread_frame import NO_LISTS, Frame, Rule
from plimsoll.emulate.operation_counts import Counts, Operations
from plimsoll.emulate.operations import fp32_operations
from plimsoll.emulate.operations.fp32_operations import lstm
from plimsoll.emulate.operations.products import Attention, Convolutions, Products
from plimsoll.emulate.operations.rounded_results import Rounded, RoundingTracer, within
from plimsoll.emulate.recipe import Recipe
from plimsoll.formats import get
from plimsoll.watch.hooks import torch_hooks

# Composite operations of products: only the products inside round.
_MADE_OF_PRODUCTS = tuple(
    """
    chain_matmul conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d einsum gru gru_cell inner
    linalg_multi_dot linalg_vecdot lstm_cell rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell tensordot
""".split()
)


class Emulation(Reentrant):
    """Context returned by `emulate`: re-entrant, and a decorator too."""

    def __init__(
        self,
        *,
        low: torch.dtype | None,
        recipe: Recipe | None,
        operations: "str | frozenset[str]",
        lists: OperationLists | None,
    ) -> None:
        super().__init__()
        self._low, self._recipe, self._selected, self._lists = low, recipe, operations, lists
        self._rules = _rules(low, recipe, operations)
        self._counts = Counts()

    @property
    def operations(self) -> Operations:
        """Number of runs of each operation inside, emulated and native."""
        return self._counts.total()

    def __repr__(self) -> str:
        """Return the precision, the formats, and how many operations ran so far."""
        low = [] if self._low is None else [get(self._low).name]
        formats = [] if self._recipe is None else self._recipe.described
        return f"<Emulation: {', '.join([*low, *formats])}, {self.operations.counted}>"

    @contextlib.contextmanager
    def _context(self) -> Generator[None]:
        around = thread_frame.current() or Frame()
        rules = {} if self._low is torch.float32 and self._recipe is None else {**around.rules, **self._rules}
        with contextlib.ExitStack() as stack:
            eager = stack.enter_context(eagerly())
            formats = self._recipe.of_results if self._recipe is not None and self._selected == "all" else {}
            frame = replace(around, rules=rules, tracer=self._tracer(), eager=eager, formats=formats)
            stack.enter_context(mha_in_python())
            stack.enter_context(frame_entry.entered(frame))
            if self._low is not None:
                lists = None if self._low is torch.float32 else self._lists
                stack.enter_context(casting(lists, self._low))
            yield

    def _tracer(self) -> thread_frame.OperationTracer:
        if self._recipe is not None and self._selected == "all":
            return RoundingTracer(self._counts, Rounded(self._recipe))
        return self._counts


def _formats_now() -> Mapping[str, str]:
    frame = thread_frame.current()
    return {} if frame is None else frame.formats


def _cast_to_now() -> torch.dtype | None:
    frame = thread_frame.current()
    casts = frame is not None and frame.lists is not NO_LISTS and frame.casts_now()
    return frame.low if frame is not None and casts else None


torch_hooks.emulated.append(_formats_now)
torch_hooks.casting.append(_cast_to_now)


def _rules(low: torch.dtype | None, recipe: Recipe | None, selected: "str | frozenset[str]") -> dict[str, Rule]:
    rules: dict[str, Rule] = {} if low in (None, torch.float32) else fp32_operations.rules()
    if recipe is None:
        return rules
    products = _product_rules(recipe)
    rounded = Rounded(recipe)
    if selected == "all":
        return rules | {name: rounded.after(rule) for name, rule in products.items()}
    if isinstance(selected, str):
        return {name: rule for name, rule in rules.items() if name not in _MADE_OF_PRODUCTS} | products
    for name in selected:
        rules |= _selected_rules(name, products, rounded)
    return rules


def _product_rules(recipe: Recipe) -> dict[str, Rule]:
    products = Products(recipe)
    rules = products.rules() | Convolutions(recipe).rules()
    rules |= {"scaled_dot_product_attention": Attention(products), "lstm": lstm}
    return {name: thread_frame.in_forward(rule) for name, rule in rules.items()}


def _selected_rules(name: str, products: Mapping[str, Rule], rounded: Rounded) -> dict[str, Rule]:
    if name in _MADE_OF_PRODUCTS or name == "lstm":
        return {name: within(products)}
    if name in products:
        return {name: products[name]}
    rule = thread_frame.in_forward(rounded.alone)
    return {name: rule} | ({f"{name}_": rule} if hasattr(torch.ops.aten, f"{name}_") else {})


@contextlib.contextmanager
def eagerly() -> Generator[bool]:
    """Run compiled code eagerly inside, since its kernels lack the emulation.

    Yields whether torch's compiler is loaded, so that it could be switched. If it is not, no compiled code exists yet,
    and loading the compiler would take seconds. Code that is compiled later inside raises instead.
    """
    if "torch._dynamo" not in sys.modules:
        yield False
        return
    with torch.compiler.set_stance("force_eager"):
        yield True
