"""The operation lists of autocast as data: which operations run low, which high, which promote, which are refused.

An operation is named as torch's dispatcher names it, without its namespace: "linear", "softmax", "scatter_add". A list
holds for every functional form of the operation (`torch.matmul`, `Tensor.matmul`, ``a @ b``); forms that write in place
or into ``out=`` run in the dtypes they are given, as under torch's own autocast.
"""

import difflib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch

from plimsoll.errors import ArgumentError

Category = Literal["low", "high", "promote", "banned"]
CATEGORIES: tuple[Category, ...] = ("low", "high", "promote", "banned")

# What Python calls otherwise than the dispatcher does.
_OTHER_NAMES = {
    "__matmul__": "matmul", "__rmatmul__": "matmul", "__pow__": "pow", "__rpow__": "pow", "grid_sample": "grid_sampler",
    "cross_entropy": "cross_entropy_loss",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationLists:
    """Four lists of operations; one that is on none of them runs in the dtypes that it is given.

    - `low`: floating inputs are cast to the low dtype first.
    - `high`: they are cast to FP32 first, unless the call itself names its `dtype`.
    - `promote`: they are cast to FP32 if any of them is FP32, and to the low dtype otherwise.
    - `banned`: the operation is refused, since its result in low precision is not to be trusted.

    FP64 is left alone throughout. Lists do not change: each method returns new ones. Raises `ArgumentError` for a name
    that is no operation of torch, with the nearest ones, and for one on two lists.

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
        for category, given in self._given():
            names = frozenset(operation_name(one, "OperationLists") for one in given)
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
            given = getattr(self, field.name)
            yield field.name, (given,) if isinstance(given, str) else given

    def of(self, operation: object) -> Category | None:
        """Return the list that the operation is on: "low", "high", "promote", "banned", or None."""
        name = operation_name(operation, "OperationLists.of")
        return next((category for category in CATEGORIES if name in getattr(self, category)), None)

    def with_low(self, *operations: object) -> "OperationLists":
        """These lists with the operations on `low`, and on no other."""
        return self._with("low", operations)

    def with_high(self, *operations: object) -> "OperationLists":
        """These lists with the operations on `high`, and on no other."""
        return self._with("high", operations)

    def with_promote(self, *operations: object) -> "OperationLists":
        """These lists with the operations on `promote`, and on no other."""
        return self._with("promote", operations)

    def with_banned(self, *operations: object) -> "OperationLists":
        """These lists with the operations on `banned`, and on no other."""
        return self._with("banned", operations)

    def without(self, *operations: object) -> "OperationLists":
        """These lists with the operations on none: they run in the dtypes that they are given."""
        return self._with(None, operations)

    def rows(self) -> list[tuple[str, Category]]:
        """Return each operation and its list, sorted by list and name: what a table shows."""
        return [(name, category) for category in CATEGORIES for name in sorted(getattr(self, category))]

    def _with(self, category: Category | None, operations: Iterable[object]) -> "OperationLists":
        names = {operation_name(one, f"OperationLists.with_{category}") for one in operations}
        lists: dict[str, Any] = {one: getattr(self, one) - names for one in CATEGORIES}
        if category is not None:
            lists[category] |= names
        return replace(self, **lists)


def operation_name(operation: object, asker: str) -> str:
    """Return the dispatcher's name of an operation given by name, as a torch function, or as a method of Tensor.

    >>> operation_name(torch.nn.functional.grid_sample, "example"), operation_name("aten::mm", "example")
    ('grid_sampler', 'mm')
    """
    name = operation if isinstance(operation, str) else getattr(operation, "__name__", None)
    name = name.removeprefix("aten::").split(".")[0] if isinstance(name, str) else ""
    name = _OTHER_NAMES.get(name, name)
    if name in _known():
        return name
    near = difflib.get_close_matches(name, _known(), n=3)
    advice = f"Did you mean {', '.join(near)}?" if near else "Names are those of torch.ops.aten."
    raise ArgumentError(f"{asker}: expected an operation of torch; got {operation!r}. {advice}")


@functools.cache
def _known() -> frozenset[str]:
    """Return the operations of torch that do not write into their arguments."""
    listed: Any = torch._C._dispatch_get_all_op_names  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]  # noqa: SLF001
    names = {name.removeprefix("aten::").split(".")[0] for name in listed() if name.startswith("aten::")}
    return frozenset(name for name in names if not name.endswith("_") or name.endswith("__"))


# Facts of torch 2.13, aten/src/ATen/autocast_mode.h and autocast_mode.cpp: what its autocast does on CUDA.
# The recurrent layers are not on its list by name: on CUDA they become `_cudnn_rnn`, which it casts by a rule apart.
CUDA = OperationLists(
    low=frozenset((
        "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell",
        "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_tbc",
        "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "einsum", "gru", "gru_cell",
        "linalg_multi_dot", "linalg_vecdot", "linear", "lstm", "lstm_cell", "matmul", "mm", "mv", "prelu", "rnn_relu",
        "rnn_relu_cell", "rnn_tanh", "rnn_tanh_cell", "scaled_dot_product_attention",
    )),
    high=frozenset((
        "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d",
        "_upsample_nearest_exact3d", "acos", "asin", "binary_cross_entropy_with_logits", "cdist", "cosh",
        "cosine_embedding_loss", "cosine_similarity", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1",
        "frobenius_norm", "group_norm", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss", "layer_norm",
        "linalg_matrix_norm", "linalg_vector_norm", "log", "log10", "log1p", "log2", "log_softmax", "logsumexp",
        "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "native_layer_norm",
        "nll_loss", "nll_loss2d", "norm", "nuclear_norm", "pdist", "poisson_nll_loss", "pow", "prod", "reciprocal",
        "renorm", "rms_norm", "rsqrt", "sinh", "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "sum",
        "tan", "triplet_margin_loss", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d",
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d",
    )),
    promote=frozenset((
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
        "tensordot", "vdot",
    )),
    banned=frozenset(("binary_cross_entropy",)),
)  # fmt: skip
