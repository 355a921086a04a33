"""The autograd graph of a loss: leaves, loss scale, values and placements."""

import contextlib
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.dtypes import EIGHT_BIT

# Attributes of results, and of running statistics, which come from no other operation; others have arguments.
_RESULTS = ("_saved_result", "_saved_out", "_saved_logsumexp", "_saved_running_", "_saved_total_weight")
LAST = 12  # nodes behind a loss that keep what the loss function was given
NEAREST = 64  # nodes behind a loss among which its loss scale, or a softmax of it, is looked for
# Losses that apply a softmax or a sigmoid themselves, and the operation that has made probabilities of logits before.
_OF_LOGITS = {
    "LogSoftmaxBackward0": ("SoftmaxBackward0", "softmax"),
    "BinaryCrossEntropyWithLogitsBackward0": ("SigmoidBackward0", "sigmoid"),
}
_ROUNDING = 1e-3  # of a divisor that is multiplied by as its reciprocal, in FP16
_SAME_VALUES = re.compile(
    "(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Squeeze|Unsqueeze|Select|Slice|ToCopy|Clone)"
    r"Backward\d"
)  # operations between the two that choose, order or cast values
NLL = ("NllLossBackward0", "NllLoss2DBackward0")
_REGRESSIONS = ("MseLossBackward0", "SmoothL1LossBackward0", "HuberLossBackward0")
_BOUNDED = {
    "ReluBackward0": ("ReLU", 0.0, math.inf),
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
}
_SAME_ORDER = re.compile("(View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|ToCopy|Clone)Backward\\d")
_OF_FUNCTION = "saved_tensors"  # of an autograd.Function: what it was given, and what it has computed
_NORMS = ("LinalgVectorNormBackward0", "NormBackward0", "NormBackward1")
_SAME_NORM = re.compile(r"(Expand|ClampMin|Clone)Backward\d")
_ANY = re.compile(r".*")
_PAIRS = re.compile("(Sub|Rsub|Mul|Div|Add|Expand)Backward\\d")  # operations that broadcast what they are given

# torch 2.9 does not show whether a hook has packed a kept tensor.
_SHOWS_HOOKS = hasattr(cast("Any", torch)._C._autograd.SavedTensor, "unpack_hook")  # noqa: SLF001

# Operations that hold results apart whatever the loss is (whitening), or keep lengths and angles as they are.
_HOLDS_APART = re.compile(r"(Linalg(?!VectorNorm)|Cholesky|Triangular|Svd|Eig|Qr|Inverse|Householder|Matrix)\w*")
_PRODUCTS = ("MmBackward0", "BmmBackward0", "MvBackward0")
_WAY_TO_NORM = 6  # nodes between a division and the norm that it divides by

# The number of the backward that runs on this thread, -1 for none. torch has it nowhere in public.
backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001


def leaves_of(roots: "list[Tensor]") -> dict[int, Tensor]:
    """Return the leaves that a backward reaches, by identity; none in checkpoints."""
    variables = (getattr(node, "variable", None) for node in nodes_of(roots))
    return {id(leaf): leaf for leaf in variables if leaf is not None}


def operations_of(root: Tensor) -> list[Any]:
    """Return the operations behind a tensor, in the order in which they ran."""
    nodes = [cast("Any", node) for node in nodes_of([root]) if getattr(node, "variable", None) is None]
    return sorted(nodes, key=position)


def position(node: Any) -> int:
    """Return a node's place among the operations recorded on its thread."""
    return node._sequence_nr()  # noqa: SLF001  (public in all but name)


def widens(node: Any) -> bool:
    """Return whether the cast's new dtype holds every value of the old one."""
    maker, output = node.next_functions[0]
    before, after = maker._input_metadata[output].dtype, node._input_metadata[0].dtype  # noqa: SLF001  (likewise)
    return torch.promote_types(before, after) == after


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept for a node's backward.

    Attributes:
        name: The node's attribute, `_saved_target` for one.
        made: True if the operation has made it.
        maker: The operation in the graph that has made it, if another has; None for a leaf or a constant.
    """

    name: str
    value: Tensor
    made: bool
    maker: Any

    @property
    def is_given(self) -> bool:
        """True if no operation in the graph has made it, and no gradient goes to it: data, a mask, a weight."""
        return not (self.made or self.of_function or self.value.requires_grad)

    @property
    def of_function(self) -> bool:
        """True if an `autograd.Function` was given it as a constant or has computed it inside: both look alike."""
        return self.name == _OF_FUNCTION and not (self.made or self.value.requires_grad)


def kept_values(node: Any, *, packed: bool = True) -> Iterator[Kept]:
    """Yield the tensors kept for a node's backward; not those that were freed, or changed in place since.

    Without `packed`, what hooks would have to unpack is left out: a checkpoint computes it again.
    """
    for name in _kept_names(cast("type[object]", type(node))):
        try:
            if not packed and _is_packed(getattr(node, f"_raw{name if name[0] == '_' else f'_{name}'}", None)):
                continue
            with contextlib.nullcontext() if packed else _without_recomputing():
                value: Any = getattr(node, name)
        except RuntimeError:
            continue
        for x in cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, Tensor):
                maker = x.grad_fn  # torch gives it back to what it has kept
                made = name.startswith(_RESULTS) or maker is node
                yield Kept(name, x, made, None if made else maker)


def _is_packed(raw: Any) -> bool:
    """Return whether a hook has packed a kept tensor, or one of several."""
    listed = cast("list[Any]", raw) if isinstance(raw, (list, tuple)) else [raw]
    return any(getattr(each, "unpack_hook", None) is not None for each in listed)


def _without_recomputing() -> contextlib.AbstractContextManager[None]:
    """Context in which a checkpoint raises a RuntimeError before it computes a tensor again, where torch shows none."""
    message = "plimsoll: not computed again"
    return contextlib.nullcontext() if _SHOWS_HOOKS else torch.autograd.graph.disable_saved_tensors_hooks(message)


# A hook that packs in 8 bits gives a plain tensor, or one with a scale in a tuple. Nothing is unpacked: older torches,
# which do not show what is packed, show nothing here.
def kept_in_8_bits(root: Tensor) -> Iterator[tuple[str, Tensor, int | None]]:
    """Yield what is kept for the backward as a plain 8-bit tensor: the operation, the tensor, and a dimension.

    Over the dimension a softmax's result has summed up to 1. None for other values.
    """
    for node in nodes_of([root]):
        kind = type(node).__name__
        for name in _kept_names(type(node)):
            with contextlib.suppress(RuntimeError):  # an earlier backward has freed them
                raw: Any = getattr(node, f"_raw{name if name[0] == '_' else f'_{name}'}", None)
                for each in cast("list[Any]", raw) if isinstance(raw, (list, tuple)) else [raw]:
                    data = getattr(each, "data", None)
                    if type(data) is Tensor and data.dtype in EIGHT_BIT:
                        is_result = kind == "SoftmaxBackward0" and name == "_saved_result"
                        dim = signed(cast("Any", node)._saved_dim) % data.dim() if is_result else None  # noqa: SLF001  (likewise)
                        yield kind.removesuffix("Backward0").removesuffix("Backward"), data.detach(), dim


def is_compiled(node: Any) -> bool:
    """Return whether a node is the one operation that a compiled graph is."""
    return type(node).__name__ == "CompiledFunctionBackward"


def is_nan_before(loss: Tensor) -> bool:
    """Return whether a value kept for the loss's last operations is NaN; on a CPU."""
    nodes = itertools.islice(nodes_of([loss]), LAST)
    kept = (kept.value.detach() for node in nodes for kept in kept_values(node, packed=False))
    return any(x.is_floating_point() and x.device.type == "cpu" and bool(torch.isnan(x).any()) for x in kept)


@functools.cache
def _kept_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def is_scaled_by(root: Tensor, scale: Tensor) -> bool:
    """Return True if the tensor was computed from a recent product with `scale`."""
    return any(_has_factor(node, scale) for node in itertools.islice(nodes_of([root]), NEAREST))


def is_multiple_of_scaled(root: Tensor, scale: Tensor) -> bool:
    """Return True if the number is a product with `scale`, perhaps divided or cast since."""
    node: Any = root.grad_fn
    while node is not None and not _has_factor(node, scale):
        node = None if _divisor(node) is None else node.next_functions[0][0]
    return node is not None


def unscaled_leaves(root: Tensor, scale: Tensor) -> list[Tensor]:
    """Return the leaves that only terms without the loss scale reach.

    Empty if all terms of the loss carry the scale, or none does.
    """
    terms = [node for node in _terms(root.grad_fn) if node is not None]
    scaled = [term for term in terms if any(_has_factor(node, scale) for node in nodes_behind([term]))]
    if not scaled or len(scaled) == len(terms):
        return []
    reached = {id(leaf) for leaf in _leaves(scaled)}
    return [leaf for leaf in _leaves([term for term in terms if term not in scaled]) if id(leaf) not in reached]


def _leaves(nodes: list[Any]) -> list[Tensor]:
    found = (getattr(node, "variable", None) for node in nodes_behind(nodes))
    return [leaf for leaf in found if leaf is not None]


def divided_by(root: Tensor) -> list[int]:
    """Return the whole numbers above 1 that a loss is divided by, the last first."""
    return _divisors(root)[0]


def divided_twice(root: Tensor) -> int:
    """Return the whole number that a loss is divided by two times on end, else 0.

    0 for a mean by hand: a sum that is divided first is no mistake.
    """
    whole, node = _divisors(root)
    twice = next((a for a, b in itertools.pairwise(whole) if a == b), 0)
    return 0 if node is None or type(node).__name__.startswith(("Add", "Sub", "Sum", "Mean", "Mul")) else twice


def _divisors(root: Tensor) -> tuple[list[int], Any]:
    """Return the whole numbers that a loss is divided by, and the operation before these divisions."""
    node, divisors = cast("Any", root.grad_fn), list[float]()
    while node is not None and (by := _divisor(node)) is not None:
        divisors += [by] if by > 1 else []
        node = node.next_functions[0][0]
    return [round(by) for by in divisors if abs(by - round(by)) < _ROUNDING * by], node


def length_of_sum(root: Tensor) -> tuple[int, torch.dtype]:
    """Return how many numbers a loss adds one after another, and in which dtype."""
    node: Any = root.grad_fn
    while node is not None and _divisor(node) is not None:
        node = node.next_functions[0][0]
    count, dtype = 0, torch.float32 if node is None else node._input_metadata[0].dtype  # noqa: SLF001  (likewise)
    while node is not None and type(node).__name__ == "AddBackward0" and node._input_metadata[0].dtype == dtype:  # noqa: SLF001
        count += 1
        makers: list[Any] = [made for made, _ in node.next_functions]
        before = [made for made in makers if type(made).__name__ == "AddBackward0"]
        node = before[0] if before else None
    return count, dtype


def softmax_over_rows(root: Tensor) -> int:
    """Return over how many rows of a batch a log softmax before an NLL loss goes, 0 if it is over the classes."""
    for node in itertools.islice(nodes_of([root]), NEAREST):
        if type(node).__name__ not in NLL:
            continue
        before, scores = _through_views(cast("Any", node).next_functions[0][0])
        if type(before).__name__ == "LogSoftmaxBackward0":
            shape = _shape_of(before)
            dim = signed(before._saved_dim) % max(len(shape), 1)  # noqa: SLF001  (likewise)
            # Rows of several places that a view has made one dimension end with the classes, as before.
            same, flat = scores == shape, len(scores) == 2 < len(shape) and scores[-1] == shape[-1]
            classes = (1 if len(shape) > 1 else 0) if same else len(shape) - 1
            if (same or flat) and dim != classes:
                return shape[dim]
    return 0


def classes_of(root: Tensor, scale: Tensor | None) -> tuple[int, float]:
    """Return the classes of a plain mean cross entropy, and what it is divided by; 0 classes for any other loss.

    A loss scale does not count as a factor.
    """
    node: Any = root.grad_fn
    divisor = 1.0
    while node is not None:
        if scale is not None and _has_factor(node, scale):
            node = next((made for made, _ in node.next_functions if made is not None), None)
        elif (by := _divisor(node)) is not None:
            node, divisor = node.next_functions[0][0], divisor * by
        else:
            break
    if node is None or type(node).__name__ not in NLL:
        return 0, 1.0
    before, scores = _through_views(node.next_functions[0][0])
    with contextlib.suppress(AttributeError, RuntimeError):  # an earlier backward has freed them
        is_plain = not _is_packed(getattr(node, "_raw_saved_weight", None))
        is_plain = is_plain and kept_tensor(node, "_saved_weight") is None
        is_mean = is_plain and node._saved_reduction == 1  # noqa: SLF001  (likewise)
        if is_mean and len(scores) > 1 and type(before).__name__ == "LogSoftmaxBackward0":
            return int(scores[1]), divisor
    return 0, 1.0


# A cosine is a product of rows, or of columns, that were divided by their own norms.
def bound_of_cosines(root: Tensor) -> tuple[float, int]:
    """Return the largest size of the scores of a cross entropy that are cosines times a constant, and its classes."""
    for node in itertools.islice(nodes_of([root]), NEAREST):
        before, _ = _through_views(cast("Any", node).next_functions[0][0]) if type(node).__name__ in NLL else (None, ())
        if type(before).__name__ != "LogSoftmaxBackward0":
            continue
        made, factor = cast("Any", before).next_functions[0][0], 1.0
        while made is not None and (_SAME_VALUES.fullmatch(type(made).__name__) or _constant_of(made) is not None):
            factor *= abs(_constant_of(made) or 1.0)
            made = made.next_functions[0][0]
        if type(made).__name__ in ("MmBackward0", "BmmBackward0"):
            sides: list[Any] = [maker for maker, _ in cast("Any", made).next_functions]
            if all(side is not None and _is_normalised(side) for side in sides):
                return factor, _shape_of(before)[-1]
    return 0.0, 0


def _constant_of(node: Any) -> float | None:
    """Return the number on a CPU that a node multiplies by; None if it does something else, or trains its factor."""
    kind = type(node).__name__
    if kind not in ("DivBackward0", "MulBackward0") or node.next_functions[-1][0] is not None:
        return None
    with contextlib.suppress(RuntimeError):  # an earlier backward has freed it
        other = kept_tensor(node, "_saved_other")
        if other is not None and other.numel() == 1 and other.device.type == "cpu" and other.is_floating_point():
            value = float(other)
            return (value if kind.startswith("Mul") else 1 / value) if value and math.isfinite(value) else None
    return None


def _is_normalised(node: Any) -> bool:
    """Return whether a node's values were divided by the norm of their last dimension, and by nothing else."""
    while node is not None and _SAME_VALUES.fullmatch(type(node).__name__):
        node = node.next_functions[0][0]
    vectors, norm = _divided_by_norm(node, _SAME_NORM)
    last = len(_shape_of(node)) - 1
    dims = [signed(dim) % (last + 1) for dim in getattr(norm, "_saved_dim", None) or ()]
    return vectors is not None and dims == [last]


def _divided_by_norm(node: Any, between: re.Pattern[str]) -> tuple[Any, Any]:
    """Return what a node has divided by its own norm, and the node of that norm; None, None for another node.

    `between`: names of the nodes that may stand between the norm and the division.
    """
    if type(node).__name__ != "DivBackward0":
        return None, None
    (vectors, _), (norm, _) = node.next_functions
    for _ in range(_WAY_TO_NORM):
        if norm is None or type(norm).__name__ in _NORMS or not between.fullmatch(type(norm).__name__):
            break
        norm = norm.next_functions[0][0] if norm.next_functions else None
    if norm is None or type(norm).__name__ not in _NORMS or norm.next_functions[0][0] is not vectors:
        return None, None
    return vectors, norm


def error_of(root: Tensor) -> tuple[str, int]:
    """Return the error that a loss is, and 1, or of which it is the negative, and -1: ("", 0) for other losses.

    The negative of a binary cross entropy is left out: the generator of a GAN may minimise it.
    """
    node, sign = cast("Any", root.grad_fn), 1
    while node is not None and (type(node).__name__ == "NegBackward0" or _divisor(node) is not None):
        sign = -sign if type(node).__name__ == "NegBackward0" else sign
        node = node.next_functions[0][0]
    kind = type(node).__name__
    if kind in _REGRESSIONS:
        return "an error of a regression", sign
    if node is None or kind not in NLL:
        return "", 0
    before, _ = _through_views(node.next_functions[0][0])
    return ("a cross entropy", sign) if type(before).__name__ == "LogSoftmaxBackward0" else ("", 0)


def given_for_logarithms(root: Tensor) -> Iterator[Tensor]:
    """Yield what NLL losses were given, unless a log softmax has made it."""
    for node in itertools.islice(nodes_of([root]), NEAREST):
        if type(node).__name__ in NLL:
            before, _ = _through_views(cast("Any", node).next_functions[0][0])
            if type(before).__name__ == "LogSoftmaxBackward0":
                continue
            with contextlib.suppress(RuntimeError):  # an earlier backward has freed them
                if (given := kept_tensor(node, "_saved_self")) is not None:
                    yield given


def targets_of(root: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the targets of NLL losses of N x C scores, and the class that each of these losses leaves out.

    Losses of which a script gets one for each row are left out: it may weigh them, as an agent's actions are.
    """
    for node in itertools.islice(nodes_of([root]), NEAREST):
        if type(node).__name__ == NLL[0]:
            with contextlib.suppress(RuntimeError):  # an earlier backward has freed them
                loss, targets = cast("Any", node), kept_tensor(node, "_saved_target")
                if targets is not None and loss._saved_reduction:  # noqa: SLF001  (likewise)
                    yield targets, signed(loss._saved_ignore_index)  # noqa: SLF001  (likewise)


def kept_tensor(node: Any, name: str) -> Tensor | None:
    """Return what a node has kept; None where a checkpoint would have to compute it again."""
    if getattr(getattr(node, f"_raw{name}", None), "unpack_hook", None) is not None:
        return None
    with _without_recomputing():
        value: object = getattr(node, name, None)
    return value.detach() if isinstance(value, Tensor) else None


# torch computes kl_div as the mean or sum of a constant less targets times what it is given, with targets as
# logarithms as targets times a constant less that.
def divergence_of_probabilities(root: Tensor) -> bool:
    """Return whether a term of the loss is a KL divergence that is given the results of a softmax or a sigmoid."""
    for term in _terms(root.grad_fn):
        node = term
        while _divisor(node) is not None or type(node).__name__ in ("MeanBackward0", "SumBackward0"):
            node = node.next_functions[0][0]
        kinds = ["SubBackward0", "MulBackward0"]
        while node is not None and type(node).__name__ in kinds:
            kinds.remove(type(node).__name__)
            makers: list[Any] = [maker for maker, _ in node.next_functions]
            given = [maker for maker in makers if maker is not None]
            if len(given) != 1 or (type(node).__name__ == "SubBackward0" and makers[0] is not None):
                break
            node, _ = _through_views(given[0])
        if not kinds and type(node).__name__ in ("SoftmaxBackward0", "SigmoidBackward0"):
            return True
    return False


def bounded_outputs(root: Tensor) -> Iterator[tuple[str, Tensor, float, float]]:
    """Yield the targets of regressions whose outputs come from a function with bounds: its name, targets, bounds."""
    for node in itertools.islice(nodes_of([root]), NEAREST):
        if type(node).__name__ in _REGRESSIONS:
            before, _ = _through_views(cast("Any", node).next_functions[0][0])
            name, low, high = _BOUNDED.get(type(before).__name__, ("", 0.0, 0.0))
            with contextlib.suppress(RuntimeError):  # an earlier backward has freed them
                if name and (targets := kept_tensor(node, "_saved_target")) is not None:
                    yield name, targets, low, high


def spread_outputs(root: Tensor) -> int:
    """Return N where outputs of shape N x 1 meet N numbers, or the reverse, and make N x N of them; else 0."""
    for term in _terms(root.grad_fn):
        node = term
        while node is not None:
            makers: list[Any] = [maker for maker in node.next_functions if maker[0] is not None]
            if len(makers) != 1:  # a layer, or two operands that both are trained: pairs that are wanted
                break
            maker, output = makers[0]
            if _PAIRS.fullmatch(type(node).__name__):
                shape, before = _shape_of(node), _shape_of(maker, output)
                if len(shape) == 2 and shape[0] == shape[1] > 1 and before in ((shape[0], 1), (shape[0],)):
                    return shape[0]
            node = maker
    return 0


# Cosines, and errors between normalised vectors, are best where both are the same. Where one side is detached, or comes
# from other weights, one vector for all rows is no shorter way there.
def only_pulls(root: Tensor, scale: Tensor | None) -> list[Tensor]:
    """Return the weights behind both sides of each term of a loss that only pulls normalised results together.

    Empty if the loss has any other term, if a term pushes, or if something on the way holds the rows apart.
    """
    waiting: list[tuple[Any, int]] = [(root.grad_fn, 1)]
    pairs = list[tuple[Any, Any]]()
    for _ in range(NEAREST):
        if not waiting:
            break
        node, sign = waiting.pop()
        kind = type(node).__name__
        makers: list[Any] = [maker for maker, _ in getattr(node, "next_functions", ())]
        given = [maker for maker in makers if maker is not None]
        if kind.startswith(("AddBackward", "SubBackward")):
            second = -sign if kind.startswith("Sub") else sign
            waiting += [(m, s) for m, s in zip(makers, (sign, second), strict=True) if m is not None]
        elif len(given) == 1 and (factor := _sign_of(node, scale)):
            waiting.append((given[0], sign * factor))
        else:
            is_error = kind == "MseLossBackward0"
            sides = [_divided_by_norm(_through_views(maker)[0], _ANY)[0] for maker in given]
            if len(sides) != 2 or None in sides or sign != (1 if is_error else -1):
                return []
            if not is_error and kind != "MulBackward0":
                return []
            pairs.append((sides[0], sides[1]))
    behind = [list(nodes_behind([side])) for pair in pairs for side in pair]
    if waiting or not pairs or any(_holds_apart(node) for nodes in behind for node in nodes):
        return []
    found = [{id(v): v for node in nodes if (v := getattr(node, "variable", None)) is not None} for nodes in behind]
    common = [key for key in found[0] if all(key in leaves for leaves in found)]
    return [found[0][key] for key in common]


def _sign_of(node: Any, scale: Tensor | None) -> int:
    """Return the sign by which a node with one operand in the graph multiplies it; 0 if it does anything else."""
    kind = type(node).__name__
    if _SAME_VALUES.fullmatch(kind) or kind.startswith(("MeanBackward", "SumBackward")):
        return 1
    if kind == "NegBackward0" or kind.startswith("RsubBackward"):
        return -1
    if kind not in ("MulBackward0", "DivBackward0"):
        return 0
    try:
        factors = [x for name in ("_saved_other", "_saved_self") if (x := kept_tensor(node, name)) is not None]
    except RuntimeError:  # an earlier backward has freed them
        return 0
    if len(factors) != 1 or factors[0].numel() != 1:
        return 0
    if scale is not None and factors[0].data_ptr() == scale.data_ptr():
        return 1
    return 0 if factors[0].device.type != "cpu" else int(factors[0].sign())


# What a function of a user's own or a compiled graph computes is not known: it may turn a gradient around. A product of
# results with data turns each row differently, and no vector is the same in all turns.
def _holds_apart(node: Any) -> bool:
    """Return whether a node may keep rows apart that a loss pulls together."""
    kind = type(node).__name__
    if isinstance(node, torch.autograd.function.BackwardCFunction) or _HOLDS_APART.fullmatch(kind):
        return True
    if kind not in _PRODUCTS:
        return False
    makers = [_through_views(maker)[0] for maker, _ in node.next_functions]
    given = [maker for maker in makers if maker is not None]
    return len(given) == 1 and not _is_leaf(given[0])


def _is_leaf(node: Any) -> bool:
    """Return whether a node is a leaf, or a leaf that was transposed."""
    while _SAME_VALUES.fullmatch(type(node).__name__):
        node = node.next_functions[0][0]
    return getattr(node, "variable", None) is not None


def _through_views(node: Any) -> tuple[Any, tuple[int, ...]]:
    """Return what has made a value, before views and casts that keep the order, and the value's shape."""
    shape = _shape_of(node)
    while node is not None and _SAME_ORDER.fullmatch(type(node).__name__):
        node = node.next_functions[0][0]
    return node, shape


def _shape_of(node: Any, output: int = 0) -> tuple[int, ...]:
    """Return the shape of an output; empty where a node does not say it."""
    outputs = getattr(node, "_input_metadata", ())
    return tuple(outputs[output].shape) if output < len(outputs) else ()


def signed(number: int) -> int:
    """Return a dimension, which torch gives as a number without a sign."""
    return number - 2**64 if number >= 2**63 else number


# A fused loss computes the gradient of its input in the forward, keeps it, and multiplies it by what comes back.
def gradients_kept_in_fp16(root: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the functions near a loss that put out a number, and FP16 values that they keep in an input's shape."""
    for node in itertools.islice(nodes_of([root]), NEAREST):
        if hasattr(node, _OF_FUNCTION) and not _shape_of(node):
            shapes = {_shape_of(maker, output) for maker, output in cast("Any", node).next_functions if maker}
            for kept in kept_values(node, packed=False):
                value = kept.value.detach()
                if kept.of_function and value.dtype == torch.float16 and value.dim() and tuple(value.shape) in shapes:
                    yield type(node).__name__.removesuffix("Backward"), value


def rows_looked_up(root: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tables in the graph with the indices that they were given."""
    for node in nodes_of([root]):
        if type(node).__name__ == "EmbeddingBackward0":
            table: Any = cast("Any", node).next_functions[0][0]
            while table is not None and getattr(table, "variable", None) is None:
                table = table.next_functions[0][0] if _SAME_VALUES.fullmatch(type(table).__name__) else None
            with contextlib.suppress(RuntimeError):  # an earlier backward has freed them
                if table is not None and (indices := kept_tensor(node, "_saved_indices")) is not None:
                    yield table.variable, indices


def casts_of_leaves(root: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the leaves that were cast, with the cast's place among the operations."""
    for node in nodes_of([root]):
        if type(node).__name__ == "ToCopyBackward0":
            leaf = getattr(cast("Any", node).next_functions[0][0], "variable", None)
            if leaf is not None:
                yield leaf, position(node)


def values_normalised(root: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield the weights of batch norms in training mode, with how many values each channel's statistics are of."""
    for node in nodes_of([root]):
        if type(node).__name__.endswith("BatchNormBackward0"):
            norm = cast("Any", node)
            weight = getattr(norm.next_functions[1][0], "variable", None)
            with contextlib.suppress(AttributeError, RuntimeError):  # an earlier backward has freed them
                shape = norm._input_metadata[0].shape  # noqa: SLF001  (likewise)
                if weight is not None and norm._saved_training:  # noqa: SLF001  (likewise)
                    yield weight, math.prod(shape) // max(shape[1], 1)


def _has_factor(node: object, scale: Tensor) -> bool:
    if type(node).__name__ != "MulBackward0":
        return False
    try:  # documented in torch's autograd notes
        factors = [kept_tensor(node, "_saved_other"), kept_tensor(node, "_saved_self")]
    except RuntimeError:  # an earlier backward has freed them
        return False
    return any(x is not None and x.data_ptr() == scale.data_ptr() for x in factors)


def _divisor(node: Any) -> float | None:
    """Return what a node divides a number by: 1 if it only casts it, None if it does more."""
    kind = type(node).__name__
    if _SAME_VALUES.fullmatch(kind):
        return 1.0
    if kind not in ("DivBackward0", "MulBackward0") or len(node._input_metadata[0].shape):  # noqa: SLF001  (likewise)
        return None
    if node.next_functions[-1][0] is not None:  # a divisor with a gradient of its own
        return None
    try:
        other = kept_tensor(node, "_saved_other")
    except RuntimeError:
        return None
    if other is None or other.numel() != 1 or other.device.type != "cpu":
        return None
    value = float(other)
    return (value if kind.startswith("Div") else 1 / value) if value > 0 else None


def _terms(node: Any) -> Iterator[Any]:
    """The terms of a sum."""
    waiting, count = [node], 0
    while waiting and count < NEAREST:
        at: Any = waiting.pop()
        count += 1
        while _SAME_VALUES.fullmatch(type(at).__name__):
            at = at.next_functions[0][0]
        if type(at).__name__ == "AddBackward0":
            waiting += [made for made, _ in at.next_functions]
        else:
            yield at


def squashed_twice(roots: "list[Tensor]") -> str:
    """Return "softmax" or "sigmoid" if a loss applies it to its own result, else ""."""
    for count, node in enumerate(nodes_of(roots)):
        if count == NEAREST:
            break
        wanted, name = _OF_LOGITS.get(type(node).__name__, ("", ""))
        before = cast("Any", node).next_functions[0][0] if wanted else None
        while before is not None and _SAME_VALUES.fullmatch(type(before).__name__):
            before = before.next_functions[0][0]
        if before is not None and type(before).__name__ == wanted:
            return name
    return ""


def nodes_of(roots: "list[Tensor]") -> Iterator[object]:
    """The graph's nodes, nearest first."""
    yield from nodes_behind([root.grad_fn for root in roots if root.grad_fn is not None])


def nodes_behind(wave: list[Any]) -> Iterator[object]:
    """Nodes, and those behind them, nearest first."""
    seen = set(wave)
    while wave:
        yield from wave
        following = {node for known in wave for node, _ in known.next_functions if node is not None}
        wave = list(following - seen)
        seen |= following


# -- placements of DTensors: which part of a whole a plain tensor is ---------------------------------------------------

_MADE_PLAIN = "_ToTorchTensorBackward"
_MADE_SHARDED = "_FromTorchTensorBackward"
_REDUCING = frozenset({_MADE_SHARDED, "RedistributeBackward"})

TakeGradient = Callable[[Tensor | None], None]


# A module that `parallelize_module` distributed gives out the local tensor of a DTensor; the node of the autograd graph
# that made it plain knows the placements still, so that its values count as those of the DTensor.
def dtensor_behind(x: Tensor) -> Tensor:
    """Return the DTensor whose local part a plain tensor is, or the tensor itself."""
    spec = _spec_behind(x)
    return x if spec is None else _sharded(x.detach(), spec)


# The gradient of a replicated DTensor may come as partial sums, which no rank can read as a number. It is reduced by
# the next node on the way back, the one that made the tensor a DTensor or redistributed it, and read after
# that.
def gradient_reader(x: Tensor, take: TakeGradient) -> TakeGradient:
    """Return a gradient hook that calls `take` as soon as the gradient can be read."""
    spec = _spec_behind(x)
    if spec is not None:
        return lambda g: take(None if g is None else _sharded(g, spec))
    node = x.grad_fn
    if not hasattr(x, "placements") or node is None or node.name() not in _REDUCING:
        return take
    waiting: list[bool] = []

    def look(g: Tensor | None) -> None:
        if g is not None and _is_partial(g):
            waiting.append(True)
        else:
            take(g)

    def after(grads: tuple[Tensor | None, ...], _: object) -> None:
        if waiting and grads and grads[0] is not None:
            waiting.clear()
            whole = node.name() == _MADE_SHARDED
            take(_sharded(grads[0], cast("Any", x)._spec) if whole else grads[0])  # noqa: SLF001

    node.register_hook(after)
    return look


def _spec_behind(x: Tensor) -> Any:
    node = x.grad_fn
    return getattr(node, "dtensor_spec", None) if node is not None and node.name() == _MADE_PLAIN else None


def _is_partial(g: Tensor) -> bool:
    return any(placement.is_partial() for placement in getattr(g, "placements", ()))


def _sharded(local: Tensor, spec: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    if isinstance(local, DTensor):
        return local
    return cast("Any", DTensor)(local, spec, requires_grad=False)
