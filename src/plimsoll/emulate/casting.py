"""Operation lists of autocast as data, and the casts of arguments to a list's dtype."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast as typed

import torch
from torch import Tensor, nn

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.kernels.dtypes import TRAINING

# -- lists: low, high, promote and banned ------------------------------------------------------------------------------

Category = Literal["low", "high", "promote", "banned"]
CATEGORIES: tuple[Category, ...] = ("low", "high", "promote", "banned")

# Operations whose name in Python differs from the dispatcher's.
_OTHER_NAMES = {
    "__matmul__": "matmul",
    "__rmatmul__": "matmul",
    "__pow__": "pow",
    "__rpow__": "pow",
    "grid_sample": "grid_sampler",
    "cross_entropy": "cross_entropy_loss",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLists:
    """Four lists of operations with the dtype of their floating inputs.

    An operation on none of them runs in the dtypes of its arguments. FP64 is never cast. Lists do not change: each
    method returns new ones.

    Args:
        low: Operations whose floating inputs are cast to the low dtype.
        high: Operations whose inputs are cast to FP32, unless the call itself passes `dtype`.
        promote: Operations whose inputs are cast to FP32 if any of them is FP32, otherwise to the low dtype.
        banned: Operations that raise, since their result in low precision is too inaccurate.

    Raises:
        ArgumentError: A name is no operation of torch (the message has the nearest ones), or is on two lists.

    >>> lists = CUDA.with_high("gelu").without("prelu")
    >>> lists.of("gelu"), lists.of("prelu"), lists.of("softmax"), lists.of("relu")
    ('high', None, 'high', None)
    """

    low: frozenset[str] = frozenset()
    high: frozenset[str] = frozenset()
    promote: frozenset[str] = frozenset()
    banned: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        seen: dict[str, str] = {}
        for category, listed in self._given():
            names = frozenset(operation_name(operation, "OperationLists") for operation in listed)
            object.__setattr__(self, category, names)
            for name in sorted(names):
                if name in seen:
                    raise ArgumentError(
                        f"OperationLists: expected an operation on one list; got {name!r} on {seen[name]} and "
                        f"{category}. Take it off one of them."
                    )
                seen[name] = category

    def _given(self) -> Iterator[tuple[str, Iterable[object]]]:
        for field in fields(self):
            yield field.name, several("OperationLists", field.name, getattr(self, field.name))

    # All names are a hundred and more, and would hide everything else in the `repr` of a policy.
    def __repr__(self) -> str:
        counts = ", ".join(f"{category}: {len(getattr(self, category))}" for category in CATEGORIES)
        return f"<OperationLists {counts}; rows() names them>"

    def of(self, operation: object) -> Category | None:
        """Return "low", "high", "promote", "banned", or None: the operation's list."""
        name = operation_name(operation, "OperationLists.of")
        return next((category for category in CATEGORIES if name in getattr(self, category)), None)

    def with_low(self, *operations: object) -> "OperationLists":
        """Return these lists with the operations on `low`, and on no other."""
        return self._with("low", operations)

    def with_high(self, *operations: object) -> "OperationLists":
        """Return these lists with the operations on `high`, and on no other."""
        return self._with("high", operations)

    def with_promote(self, *operations: object) -> "OperationLists":
        """Return these lists with the operations on `promote`, and on no other."""
        return self._with("promote", operations)

    def with_banned(self, *operations: object) -> "OperationLists":
        """Return these lists with the operations on `banned`, and on no other."""
        return self._with("banned", operations)

    def without(self, *operations: object) -> "OperationLists":
        """Return these lists with the operations on none of them."""
        return self._with(None, operations)

    def rows(self) -> list[tuple[str, Category]]:
        """Return pairs of operation and list, sorted by list, then by name."""
        return [(name, category) for category in CATEGORIES for name in sorted(getattr(self, category))]

    def _with(self, category: Category | None, operations: Iterable[object]) -> "OperationLists":
        method = "without" if category is None else f"with_{category}"
        names = {operation_name(operation, f"OperationLists.{method}") for operation in operations}
        lists: dict[str, Any] = {name: getattr(self, name) - names for name in CATEGORIES}
        if category is not None:
            lists[category] |= names
        return replace(self, **lists)


def several(asker: str, name: str, operations: object) -> Iterable[object]:
    """Return the operations of an argument, which may be one or several."""
    if isinstance(operations, str) or callable(operations):
        return (operations,)
    if not isinstance(operations, Iterable):
        raise ArgumentError(
            f"{asker}: expected {name} to be an operation or several; got {name}={operations!r}. Write their names, as "
            "in ('matmul', 'softmax')."
        )
    return typed("Iterable[object]", operations)


def check_lists(asker: str, lists: object) -> None:
    """Raise `ArgumentError` unless it is `OperationLists` or None."""
    if not isinstance(lists, OperationLists | None):
        raise ArgumentError(
            f"{asker}: expected lists to be OperationLists; got {lists!r}. Change plimsoll.emulate.CUDA, as in "
            "CUDA.with_high('gelu')."
        )


# An operation has the name of torch's dispatcher, without its namespace: "linear", "softmax", "scatter_add". A list
# holds for every functional form of the operation (`torch.matmul`, `Tensor.matmul`, `a @ b`). Forms that write in place
# or into `out=` run in the dtypes of their arguments, as under torch's own autocast.
def operation_name(operation: object, asker: str) -> str:
    """Return the dispatcher's name of an operation, torch function or Tensor's method.

    The error for an unknown one is in the words of the public function `asker`, and has the nearest names.

    >>> operation_name(torch.nn.functional.grid_sample, "example"), operation_name("aten::mm", "example")
    ('grid_sampler', 'mm')
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", None)
    name = name.removeprefix("aten::").split(".")[0] if isinstance(name, str) else ""
    name = _OTHER_NAMES.get(name, name)
    if name in _known():
        return name
    near = checks.nearest(name, _known())
    advice = f"Did you mean {', '.join(near)}?" if near else "Names are those of torch.ops.aten."
    raise ArgumentError(f"{asker}: expected an operation of torch; got {operation!r}. {advice}")


@functools.cache
def _known() -> frozenset[str]:
    """Return the operations of torch that do not write into their arguments."""
    listed: Any = torch._C._dispatch_get_all_op_names  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  # noqa: SLF001
    names = {name.removeprefix("aten::").split(".")[0] for name in listed() if name.startswith("aten::")}
    return frozenset(name for name in names if not name.endswith("_") or name.endswith("__"))


# From torch 2.13, aten/src/ATen/autocast_mode.h and autocast_mode.cpp: the lists of its autocast on CUDA. torch has the
# recurrent layers on no list: on CUDA they become `_cudnn_rnn`, which has a cast rule of its own.
CUDA = OperationLists(
    low=frozenset(
        """
        _convolution _scaled_dot_product_flash_attention _thnn_fused_gru_cell _thnn_fused_lstm_cell addbmm addmm addmv
        addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d
        convolution einsum gru gru_cell linalg_multi_dot linalg_vecdot linear lstm lstm_cell matmul mm mv prelu rnn_relu
        rnn_relu_cell rnn_tanh rnn_tanh_cell scaled_dot_product_attention
    """.split()
    ),
    high=frozenset(
        """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss
        cosine_similarity cumprod cumsum dist erfinv exp expm1 frobenius_norm group_norm hinge_embedding_loss huber_loss
        kl_div l1_loss layer_norm linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax logsumexp
        margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss native_layer_norm nll_loss nll_loss2d norm
        nuclear_norm pdist poisson_nll_loss pow prod reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss
        soft_margin_loss softmax softplus sum tan triplet_margin_loss upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """.split()
    ),
    promote=frozenset(
        """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
""".split()
    ),
    banned=frozenset(("binary_cross_entropy",)),
)

# -- casts of an operation's arguments, and their cache ----------------------------------------------------------------

# FP64 is left alone, as torch's autocast leaves it; 8-bit dtypes only hold codes.
_CASTABLE = frozenset(TRAINING.values())


class CastCache:
    """Cache of the casts of weights, so that a weight used twice is cast once."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[Tensor], int, Tensor]] = {}

    # The cache holds only casts of leaves that require a gradient, and only while autograd records. An entry is dropped
    # when its weight changes or a gradient reaches it, since the next use belongs to another forward.
    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `x` in the dtype, from the cache if `x` is unchanged."""
        key = (id(x), dtype)
        entry = self._casts.get(key)
        if entry is not None and entry[0]() is x and entry[1] == x._version:  # noqa: SLF001
            return entry[2]
        result = x.to(dtype)
        self._casts[key] = (weakref.ref(x), x._version, result)  # noqa: SLF001
        if result.requires_grad:
            result.register_hook(_forgetting(weakref.ref(self), key))
        return result

    def clear(self) -> None:
        """Drop all entries."""
        self._casts.clear()

    def forget(self, key: tuple[int, torch.dtype]) -> None:
        """Drop an entry, if it exists."""
        self._casts.pop(key, None)

    def __len__(self) -> int:
        return len(self._casts)


def _forgetting(cache: "weakref.ref[CastCache]", key: tuple[int, torch.dtype]) -> Callable[[Tensor], None]:
    # A weak reference: the hook stays on the graph, which may outlive the context and its cache.
    def forget(_: Tensor) -> None:
        owner = cache()
        if owner is not None:
            owner.forget(key)

    return forget


def castable(x: object) -> bool:
    """Return whether `x` is a floating tensor of 16 or 32 bits, as lists cast."""
    return isinstance(x, Tensor) and x.dtype in _CASTABLE


def cast(x: Any, dtype: torch.dtype, cache: CastCache | None) -> Any:
    """Return an argument with every castable tensor in it in the dtype."""
    if isinstance(x, Tensor):
        if x.dtype is dtype or x.dtype not in _CASTABLE:
            return x
        return cache.cast(x, dtype) if cache is not None and _may_keep(x) else x.to(dtype)
    if isinstance(x, list | tuple):
        return [cast(item, dtype, cache) for item in typed("list[Any]", x)]
    return x


def _may_keep(x: Tensor) -> bool:
    return type(x) in (nn.Parameter, Tensor) and x.is_leaf and x.requires_grad and torch.is_grad_enabled()


def promoted(low: torch.dtype, arguments: Any) -> torch.dtype:
    """Return the low dtype if all castable arguments have it, else FP32."""
    return torch.float32 if any(x.dtype is not low for x in tensors(arguments)) else low


def tensors(arguments: Any) -> list[Tensor]:
    """Return the castable tensors among the arguments."""
    castables = list[Tensor]()
    for x in arguments:
        if isinstance(x, list | tuple):
            castables.extend(item for item in typed("list[Any]", x) if castable(item))
        elif castable(x):
            castables.append(x)
    return castables
