"""Location of a step's first NaN or Inf, found when the loss or a gradient breaks.

The step may be sampled or not. Steps that are not sampled pay nothing for it. When the loss that goes backward is not
finite, all is still there: the inputs, the weights as the forward has used them, and in the autograd graph the values
that the backward needs. They are searched once, in the order in which one makes the other. A sampled step has shown
which module's output each operation of the graph is, and the graph of a later step is the same if its operations are.
"""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Event, Record
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import (
    Kept,
    is_compiled,
    is_nan_before,
    kept_values,
    operations_of,
    position,
    widens,
)
from plimsoll.watch.names import clean, tensors_among, tensors_in
from plimsoll.watch.parameters.optimizer_tensors import Parameters, as_real
from plimsoll.watch.session import WatchSession, contained, nothing_recorded
from plimsoll.watch.steps.losses import Loss, Losses
from plimsoll.watch.taps.compiled_taps import is_capturing

_MOST_ENTRIES = 10_000  # of a step whose graph is learned
_MOST_GRAPHS = 8  # that are known at a time: models that alternate, inputs that some batches lack
_MOST_EVENTS = 5  # a training that overflows now and then is looked through so often
_NAMED = 20
_AFTER_A_SKIP = 64  # backwards in which NaN is looked for: what a scaler skips may be no overflow of its scale
_HELD_BYTES = 16 << 20  # of inputs that are kept alive up to the backward
# Operations that give NaN or Inf only if they are given some, or that only rearrange values.
# The graph keeps what log_softmax made of the logits and not the logits, so without
# them the loss would be blamed for logits that overflowed.
_PASSING = tuple(
    f"{name}Backward"
    for name in (
        "Relu", "LeakyRelu", "Hardtanh", "Elu", "Sigmoid", "Tanh", "NativeDropout", "Clone", "View", "UnsafeView",
        "Alias", "ReshapeAlias", "T", "Transpose", "Permute", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select",
        "Split", "LogSoftmax",
    )
)  # fmt: skip
_LARGEST_BUFFER = 1 << 20  # values; running statistics are far smaller
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_ADDING = ("AddBackward0", "SubBackward0")
_OF_LOSS = {  # constants of losses by the name under which an operation keeps them, and how they are called
    "_saved_target": "targets",
    "_saved_weight": "weights",
    "_saved_pos_weight": "weights",
}
_LOSSES = ("Loss", "BinaryCrossEntropy")  # parts of the names of operations that have such constants


class Boundary(Protocol):
    """The boundary between steps (`step_boundary.Steps`)."""

    losses: Losses

    @property
    def step_of_backward(self) -> int:
        """The number of the step that a backward which begins now belongs to."""
        ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a step's first NaN or Inf is: a kind, names, a remark, and what a loss was given that broke it."""

    where: str
    names: list[str]
    more: str = ""
    given: str = ""
    step: int = 0


@dataclass(frozen=True, slots=True)
class _Output:
    """An output of the model, its version, and the position of the operation that made it with the output's number."""

    x: Tensor
    version: int
    at: int
    number: int


@dataclass(frozen=True, slots=True)
class _Cause:
    """The first operation of a graph that gave NaN or Inf.

    Attributes:
        place: Its place among the operations.
        comes_in: True if it was given that by no operation in the graph.
        kept: The constant that it was given, if it has kept it.
    """

    place: int
    comes_in: bool
    kept: Kept | None = None


class Buffers:
    """New NaN and Inf in a model's buffers: running statistics that overflow.

    They are counted at sampled steps, and distinguished from those that were there at first (masks) when the device has
    counted.
    """

    def __init__(self, session: WatchSession) -> None:
        self._session = session
        self._at_first: dict[str, DeviceValue] = {}
        self._said: set[str] = set()

    def look(self) -> None:
        """Counts those of now."""
        model = self._session.model()
        if model is None:
            return
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for raw, x in model.named_buffers():
            name = clean(raw)
            plain = type(x) in _PLAIN and x.layout == torch.strided and not x.is_meta
            numbers = x.is_floating_point() or x.is_complex()
            if plain and numbers and x.numel() <= _LARGEST_BUFFER and name not in self._said:
                by_device.setdefault(x.device, {})[name] = as_real(x.detach())
        for device, named in by_device.items():
            counts = kernels.new_counts(len(named), device)
            for place, x in enumerate(named.values()):
                kernels.count_nonfinite_into([x], counts, place)
            self._hand_over(list(named), DeviceValue(counts))

    def _hand_over(self, names: list[str], counts: DeviceValue) -> None:
        step, key = self._session.step, "\n".join(names)
        before = self._at_first.setdefault(key, counts)
        if before is counts:
            return

        def produce() -> list[Record]:
            more = (counts.tensor() > before.tensor()).numpy()
            broken_names = [name for name, broken in zip(names, more, strict=True) if broken and name not in self._said]
            self._said.update(broken_names)
            if not broken_names:
                return []
            message = f"NaN or Inf came into the buffers {', '.join(broken_names[:3])}, seen at step {step}"
            details: dict[str, object] = {"where": "buffers", "names": broken_names[:_NAMED], "of": len(broken_names)}
            return [Event(step=step, kind="origin", message=message, details=details)]

        self._session.writer.submit(produce, 16 * len(names))


class Origin(torch_hooks.TrainingEvents):
    """Listener of forwards, backwards and steps that finds where NaN and Inf began."""

    def __init__(self, session: WatchSession, parameters: Parameters, boundary: Boundary, model: nn.Module) -> None:
        self.session, self._parameters, self._boundary = session, parameters, boundary
        self._graphs = GraphNames()
        self._inputs: list[tuple[str, weakref.ref[Tensor]]] = []
        self._held: list[Tensor] = []  # inputs that the backward may not keep
        self._outputs: list[_Output] = []  # of the model
        self._room = 0  # bytes of both that may be kept alive
        self._broken = False  # the last loss was not finite
        self._found: tuple[Loss | None, _Place] | None = None  # of a loss that another model may step on
        self._events = 0
        self._scaled = False
        self._stepped = False  # an optimizer, since a scaler's step began
        self._looks = 0  # backwards that are looked at since a scaler has skipped a step
        self._before_skip: _Place | None = None  # where NaN is, of a loss that is finite
        devices = {p.device.type for p in itertools.chain(model.parameters(), model.buffers())}
        session.due.traced = devices <= {"cpu"}
        self._buffers = Buffers(session)
        self._buffers.look()
        session.at_close.append(self._release)

    @property
    def names(self) -> "GraphNames | None":
        """The names to add modules' inputs and outputs to in sampled steps, or None."""
        return self._graphs if self.session.due.traced else None

    @contained
    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The root module is called: the forward before is of no use any more."""
        self._graphs.forget()
        self._release()
        self._inputs.clear()
        if not self.session.due.traced:
            return
        self._room = _HELD_BYTES
        for path, x in tensors_among(args, kwargs):
            self._inputs.append((path, weakref.ref(x)))
            if self._has_room(x):
                self._held.append(x)

    @contained
    def forward_ends(self, output: Any) -> None:
        """The root module has returned: where that is finite, only the loss can have broken."""
        if self.session.due.traced:
            for _, x in tensors_in(output):
                if x.grad_fn is not None and _is_read(x) and self._has_room(x):
                    # Without the graph, which a script may have dropped.
                    self._outputs.append(_Output(x.detach(), x._version, position(x.grad_fn), x.output_nr))  # noqa: SLF001

    def _has_room(self, x: Tensor) -> bool:
        self._room -= x.numel() * x.element_size()
        return self._room >= 0

    def _release(self) -> None:
        self._held.clear()
        self._outputs.clear()

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward begins: a loss that is not finite, and was before, is traced back."""
        if self._idle() or not isinstance(tensors, Tensor) or tensors.numel() != 1 or tensors.device.type != "cpu":
            self._release()
            return
        broken = not math.isfinite(float(tensors.detach()))
        if self._graphs.has_new:
            self._graphs.learn(tensors)
        whose = self._parameters.reach([tensors]) if broken or self._broken else "ours"  # a walk of the graph
        if whose == "both":
            self._found = (self._boundary.losses.running, place) if broken and (place := self._place(tensors)) else None
        elif whose != "others":
            if broken and not self._broken and (place := self._place(tensors)):
                self._say(place)
            self._broken = broken
            self._before_skip = None
            if self._looks and not broken:
                self._looks -= 1
                self._before_skip = self._place(tensors) if is_nan_before(tensors) else None
        self._release()

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer steps: gradients of a finite loss that are not finite are named."""
        if self.session.sample is not None and not self.session.muted and not is_capturing():
            self._buffers.look()
        if self._idle() or self._broken or self._scaled or optimizer not in self._parameters.optimizers:
            return
        if self._found is not None and (loss := self._found[0]) is not None and loss.holders:
            return  # it may be this optimizer's: said when it has stepped
        count = self._parameters.count_nonfinite()
        if count is None or count.device.type != "cpu" or not int(count):
            return
        model = self.session.model()
        named = [] if model is None else [(clean(name), p.grad) for name, p in model.named_parameters()]
        broken = [name for name, _ in self._broken_among(((n, g) for n, g in named if g is not None), masked=False)]
        if broken:
            ran = self._graphs.order
            last = max(broken, key=lambda name: ran.get(name.rpartition(".")[0], -1))
            first = [last, *(name for name in reversed(broken) if name != last)] if ran else broken[::-1]
            self._say(_Place("gradients", first, "the loss was finite", step=self.session.step))
        self._broken = True

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped: what was found of its loss is the model's."""
        self._stepped = True
        self._settle()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss: gradients that overflow are its business."""
        self._scaled = True

    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned: NaN in the forward of one that it skips is named."""
        skipped, self._stepped = not self._stepped, False
        self._settle()
        if skipped and self._before_skip is not None:
            self._say(self._before_skip)
            self._looks = 0
        elif skipped and self._events < _MOST_EVENTS:
            self._looks = _AFTER_A_SKIP
        self._before_skip = None

    @contained
    def _settle(self) -> None:
        known, _ = self._found or (None, None)
        if self._found is not None and known is not None and known.taken:
            place, self._found = self._found[1], None
            if not self._broken:
                self._say(place)
            self._broken = True

    # -- the search

    def _place(self, loss: Tensor) -> "_Place | None":
        """Return the first non-finite value's location."""
        model = self.session.model()
        place = None if model is None else self._look(model, loss)
        return None if place is None else replace(place, step=self._boundary.step_of_backward)

    def _look(self, model: nn.Module, loss: Tensor) -> _Place:
        inputs = [(f"{self.session.name}:input{path}", x) for path, ref in self._inputs if (x := ref()) is not None]
        weights = ((clean(name), p) for name, p in model.named_parameters())
        for where, named in (("weights", weights), ("input", inputs)):
            broken = [name for name, _ in self._broken_among(named, masked=where != "weights")]
            if broken:
                return _Place(where, broken)
        with nothing_recorded():  # what a checkpoint has not kept is computed again
            operations = operations_of(loss)
            finite = _largest_finite(operations, self._outputs)
            first = _first_broken(operations, finite)
            if first is None:
                return _Place("loss", [], "all that is left is finite")
            names = self._graphs.of(operations) or self._by_parameters(model, operations)
            node, is_named = operations[first.place], any(place == first.place for place, _ in names)
            if is_compiled(node) and not is_named:
                return self._compiled(model, node)
        constant = _constant_of_loss(node, first, finite)
        if constant == "targets":
            return _Place("targets", [], given=constant)
        # An operation belongs to the first module that returns after it, and of those at once to the inner one. Where a
        # module is given what no module has returned, the operations before belong to that input.
        module = next((name for place, name in names if place >= first.place), None)
        if module is not None and constant != "weights":
            before = self._graphs.untracked_before(module) if first.comes_in else []
            return _Place("activations", before or [module], "needs no gradient" if before else "")
        last = names[-1][1] if names and not constant else ""
        named = [last] if last and last != f"{self.session.name}:output" else []
        more = f"in {_CONSTANTS[constant]}" if constant else "the outputs are finite"
        return _Place("loss", named, more, constant)

    # Of compiled code the graph keeps first what it was given, then what it has computed: a value before a weight that
    # was given is an input. Others may be either.
    def _compiled(self, model: nn.Module, node: Any) -> _Place:
        """Return the place of NaN or Inf that compiled code was given, or that is somewhere inside it."""
        kept = list(kept_values(node))
        weights = [at for at, each in enumerate(kept) if each.value.is_leaf and each.value.requires_grad]
        buffers = {x.data_ptr(): clean(name) for name, x in model.named_buffers()}
        for at, each in enumerate(kept):
            if each.of_function and _is_broken(each.value):
                if (buffer := buffers.get(each.value.data_ptr())) is not None:
                    return _Place("buffers", [buffer])
                if weights and at < weights[-1]:
                    return _Place("input", [f"{self.session.name}:input"])
        modules = {id(p): clean(name).rpartition(".")[0] or self.session.name for name, p in model.named_parameters()}
        inside = {id(leaf) for leaf in _leaves(node)}
        return _Place("compiled", list(dict.fromkeys(name for key, name in modules.items() if key in inside)))

    def _by_parameters(self, model: nn.Module, operations: list[Any]) -> list[tuple[int, str]]:
        """Return names in an unlearned graph: inputs and outputs of parameters' modules."""
        modules = {id(p): clean(name).rpartition(".")[0] or self.session.name for name, p in model.named_parameters()}
        names: list[tuple[int, str]] = []
        for place, node in enumerate(operations):
            if is_compiled(node):  # of several modules
                continue
            module = next((name for p in _leaves(node) if (name := modules.get(id(p))) is not None), None)
            if module is not None and not _passes(node):
                names += [(place - 1, f"{module}:input"), (place, f"{module}:output")]
        return names

    def _say(self, place: _Place) -> None:
        self._events += 1
        details: dict[str, object] = {"where": place.where, "names": place.names[:_NAMED], "of": len(place.names)}
        if place.given:
            details["given"] = place.given
        if (largest := self._largest_input()) is not None:
            details["largest_input"] = largest
        message = f"NaN or Inf began at step {place.step} in {_in_words(place)}"
        self.session.writer.write(Event(step=place.step, kind="origin", message=message, details=details))

    def _largest_input(self) -> float | None:
        """Return the largest finite magnitude that the model was given; None where no input is left."""
        given = [x.detach() for _, ref in self._inputs if (x := ref()) is not None]
        sizes = [x.abs().nan_to_num(0.0, 0.0, 0.0).amax() for x in given if x.numel() and x.is_floating_point()]
        return max(map(float, sizes)) if sizes else None

    def _broken_among(self, named: Iterable[tuple[str, Tensor]], *, masked: bool) -> Iterator[tuple[str, Tensor]]:
        """Those with NaN or Inf; -Inf is none where it may be a mask."""
        for name, x in named:
            plain = type(x) in _PLAIN and x.device.type == "cpu" and x.layout == torch.strided
            if plain and (x.is_floating_point() or x.is_complex()):
                values = as_real(x.detach())
                if bool((torch.isnan(values) | (values == math.inf) if masked else ~torch.isfinite(values)).any()):
                    yield name, x

    # The loss must be known without waiting, so this is for models on a CPU that run eagerly. `recorder=` names the
    # collections that a watch measures at every step elsewhere.
    def _idle(self) -> bool:
        if not self.session.due.traced or not self.session.open or self._events >= _MOST_EVENTS:
            return True
        return self.session.muted or self.session.is_elsewhere() or WatchSession.repeating or is_capturing()


class GraphNames:
    """Names of the modules' inputs and outputs in autograd graphs, by their operation's place.

    Learned in sampled steps, whose modules have hooks. A graph is known again by its operations.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, int]] = []  # of the forward that runs: name, and position of the operation
        self._positions: set[int] = set()  # of these
        self._learned: dict[tuple[int, int], None] = {}  # forwards: number of entries and of operations
        self._known: dict[int, list[tuple[int, str]]] = {}
        self.order: dict[str, int] = {}  # modules by when they return
        self._untracked: list[str] = []  # outputs that need no gradient, since the last one that does
        self._before: dict[str, list[str]] = {}  # those, by the entries up to the next such output

    def add_inputs(self, module: str, inputs: list[tuple[str, Tensor]]) -> None:
        """A module is called: what no module has returned was made between them."""
        for path, x in inputs:
            if x.grad_fn is not None and (at := position(x.grad_fn)) not in self._positions:
                self._enter(f"{module}:input{path}", at)

    def add_outputs(self, module: str, outputs: list[tuple[str, Tensor]]) -> None:
        """A module has returned."""
        for path, x in outputs:
            name = f"{module}:output{path}"
            if x.grad_fn is None:
                self._untracked = [*self._untracked[1 - _NAMED :], name]
            elif self._enter(name, position(x.grad_fn)):
                self._untracked = []

    def _enter(self, name: str, at: int) -> bool:
        if len(self._entries) >= _MOST_ENTRIES:
            return False
        self._entries.append((name, at))
        self._positions.add(at)
        if self._untracked:
            self._before[name] = self._untracked
        return True

    def untracked_before(self, name: str) -> list[str]:
        """Return the outputs right before one that need no gradient, the last first."""
        return self._before.get(name, [])[::-1]

    def forget(self) -> None:
        """Another forward begins."""
        self._entries.clear()
        self._positions.clear()
        self._untracked = []

    @property
    def has_new(self) -> bool:
        """True if the forward differs from those that were learned."""
        return bool(self._entries) and self._forward not in self._learned

    @property
    def _forward(self) -> tuple[int, int]:
        return len(self._entries), self._entries[-1][1] - self._entries[0][1]

    def learn(self, loss: Tensor) -> None:
        """Learn the names in the graph behind a loss."""
        if len(self._learned) >= _MOST_GRAPHS:
            self._learned.clear()
            self._known.clear()
        self._learned[self._forward] = None
        operations = operations_of(loss)
        places = {position(node): place for place, node in enumerate(operations)}
        self._known[_signature(operations)] = [(places[at], name) for name, at in self._entries if at in places]
        self.order = {name.rpartition(":")[0]: place for place, (name, _) in enumerate(self._entries)}

    def of(self, operations: list[Any]) -> list[tuple[int, str]] | None:
        """Return the names in a graph, with operations' places, in the modules' order."""
        return self._known.get(_signature(operations))


def _signature(operations: list[Any]) -> int:
    return hash(tuple(type(node).__name__ for node in operations))


def _in_words(place: _Place) -> str:
    """Return a place as text."""
    if place.where == "targets":
        return "the targets of the loss"
    if place.where == "compiled":
        first, *more = place.names or [""]
        layers = f" (layers {first} to {more[-1]})" if more else f" (layer {first})" if first else ""
        return f"the compiled code{layers}"
    named = f" {', '.join(place.names[:3])}" if place.names else ""
    return f"{place.where}{named}" + (f" ({place.more})" if place.more else "")


_Finite = Mapping[tuple[Any, int], float]


def _largest_finite(operations: list[Any], outputs: "list[_Output]") -> _Finite:
    """Return the largest magnitudes of operations' outputs that are seen to be finite.

    They are seen where a later operation keeps them, or as outputs of the model. The keys are an operation and a number
    of its output.
    """
    finite: dict[tuple[Any, int], float] = {}
    numbered = {position(node): node for node in operations} if outputs else {}
    kept = (each.value for node in operations for each in kept_values(node, packed=False) if not each.made)
    seen = itertools.chain(
        ((x.grad_fn, x.output_nr, x) for x in kept if x.grad_fn is not None and _is_read(x)),
        ((numbered.get(out.at), out.number, out.x) for out in outputs if out.x._version == out.version),  # noqa: SLF001
    )
    for node, number, x in seen:
        largest = float(x.detach().abs().amax()) if x.numel() else 0.0
        if math.isfinite(largest):
            finite[node, number] = largest
    return finite


def _first_broken(operations: list[Any], finite: _Finite) -> _Cause | None:
    """Return the first operation that made NaN or Inf, but not -Inf, or was given that."""
    places = {node: place for place, node in enumerate(operations)}
    for place, node in enumerate(operations):
        broken = [kept for kept in kept_values(node) if _is_broken(kept.value)]
        alone = len(node._input_metadata) == 1  # noqa: SLF001  (public in all but name)
        if not broken or (alone and (node, 0) in finite):  # what it was given did no harm
            continue
        # What is given comes before what is made of it.
        first = min(broken, key=lambda kept: (kept.maker not in places, kept.made, not kept.is_given))
        nan = bool(torch.isnan(first.value.detach()).any())
        if first.maker in places:
            maker = first.maker
            return _Cause(places[maker], False) if not _passes(maker, nan) else _maker(maker, places, finite, nan)
        if first.is_given:
            return _Cause(place, True, first)
        if is_compiled(node) or (first.made and not _passes(node)):
            return _Cause(place, False)
        return _maker(node, places, finite, nan)
    return None


def _maker(node: Any, places: Mapping[Any, int], finite: _Finite, nan: bool) -> _Cause:
    """Return the operation behind a node, past those that make no NaN; comes in if there is none.

    The place is then that of the last operation that it passed. Operations whose outputs are finite are left out.
    """
    while True:
        made = {places[made]: made for made, at in node.next_functions if made in places and (made, at) not in finite}
        before = [place for place, made in made.items() if not _is_of_leaf(made)]
        if not before:
            return _Cause(places[node], True)
        node = made[max(before)]
        if not _passes(node, nan):
            return _Cause(places[node], False)


_CONSTANTS = {"weights": "its weights", "constant": "its constants: targets, weights, masks, factors"}


def _constant_of_loss(node: Any, cause: _Cause, finite: _Finite) -> str:
    """Return which constant of a loss was broken: "targets", "weights", "constant" or "" for none."""
    if cause.kept is not None:
        is_loss = any(part in type(node).__name__ for part in _LOSSES)
        return _OF_LOSS.get(cause.kept.name if is_loss else "", "constant")
    if type(node).__name__ not in _ADDING or [made for made, _ in node.next_functions].count(None) != 1:
        return ""
    # Of a finite value and a constant the sum is NaN or Inf if the constant is, unless both are huge.
    (other,) = (each for each in node.next_functions if each[0] is not None)
    dtype = node._input_metadata[0].dtype  # noqa: SLF001  (likewise)
    largest = finite.get(other)
    small = largest is not None and dtype.is_floating_point and largest < torch.finfo(dtype).max * 2.0**-32
    return "constant" if small else ""


def _is_read(x: Tensor) -> bool:
    """Return whether a tensor's values may be looked at without waiting for a device."""
    return x.is_floating_point() and x.device.type == "cpu" and x.layout == torch.strided and type(x) in _PLAIN


def _is_broken(x: Tensor) -> bool:
    """Return whether there is NaN or Inf in a tensor; -Inf is none, since it may be a mask."""
    values = x.detach()
    return _is_read(x) and bool((torch.isnan(values) | (values == math.inf)).any())


def _leaves(node: Any) -> Iterator[Any]:
    """Yield the leaves that an operation is given, as they are or transposed."""
    for made, _ in node.next_functions:
        leaf = getattr(made, "variable", None)
        if leaf is not None:
            yield leaf
        elif made is not None and _passes(made):
            yield from (
                variable
                for inner, _ in made.next_functions
                if (variable := getattr(inner, "variable", None)) is not None
            )


# A linear layer transposes its weight after its input was made. The weights were looked at before.
def _is_of_leaf(node: Any) -> bool:
    """Return whether an operation only rearranges a leaf."""
    return _passes(node) and all(hasattr(made, "variable") for made, _ in node.next_functions)


def _passes(node: Any, nan: bool = False) -> bool:
    """Return whether an operation makes no NaN (`nan`), or no NaN and no Inf either."""
    name = type(node).__name__.rstrip("0123456789")
    return name in _PASSING or (name == "ToCopyBackward" and (nan or widens(node)))
