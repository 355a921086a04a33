"""Kinds of operations, entries of a recording, and formats that products add up in."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from plimsoll.formats import get_element
from plimsoll.tracing.operation_schema import Facts
from plimsoll.tracing.tensors import tensors_in
from plimsoll.watch.call_site import Place

# -- kinds, by torch's dispatcher names, and entries -------------------------------------------------------------------

Kind = Literal[
    "product", "attention", "cast", "normalization", "softmax", "loss", "reduction", "embedding", "collective",
    "pointwise", "exact", "custom", "module",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
MULTIPLYING = ("product", "attention")

# The tensors that a product multiplies, by the schema's names. A bias is added afterwards and is no operand.
_FACTORS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("mm", "bmm", "_int_mm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), ("self", "mat2")),
    **dict.fromkeys(("addmm", "_addmm_activation"), ("mat1", "mat2")),
    **dict.fromkeys(("baddbmm", "addbmm"), ("batch1", "batch2")),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "addr": ("vec1", "vec2"),
    **dict.fromkeys(("dot", "vdot"), ("self", "tensor", "other")),
    **dict.fromkeys(("matmul", "einsum"), ("self", "other", "tensors")),
    **dict.fromkeys(("linear", "_mkl_linear", "_linear_pointwise"), ("input", "X", "weight", "W", "self", "MKL_W")),
    "linear_backward": ("self", "grad_output", "weight"),
    **dict.fromkeys(
        (
            "convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "_convolution_pointwise",
            "conv_tbc",
        ),
        ("input", "self", "X", "weight", "W"),
    ),
    "convolution_backward": ("grad_output", "input", "weight"),
    "_trilinear": ("i1", "i2", "i3"),
    **dict.fromkeys(("lstm", "gru", "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), ("input", "weight", "weight0")),
    **dict.fromkeys(
        ("mkldnn_rnn_layer_backward", "_cudnn_rnn_backward", "miopen_rnn_backward"),
        ("input", "weight", "weight1", "grad_output"),
    ),
}  # fmt: skip
CONVOLUTIONS = frozenset(name for name in _FACTORS if "conv" in name)
_NORMALIZATIONS = ("layer_norm", "group_norm", "batch_norm", "rms_norm", "instance_norm")
_LOSSES = (
    "mse_loss", "nll_loss", "nll_loss2d", "binary_cross_entropy", "binary_cross_entropy_with_logits", "smooth_l1_loss",
    "huber_loss", "soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "kl_div", "_ctc_loss",
    "cross_entropy_loss", "l1_loss", "linear_cross_entropy",
)  # fmt: skip
_REDUCTIONS = frozenset((
    "sum", "mean", "prod", "var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm", "cumsum", "cumprod",
    "logcumsumexp", "nansum", "_foreach_norm", "index_add", "scatter_add", "scatter_reduce", "segment_reduce", "trace",
    "cdist", "_cdist_forward", "renorm",
))  # fmt: skip
# They move, select, fill or compare values and round none, so that no dtype of theirs loses anything.
_EXACT = frozenset((
    "_foreach_copy", "_foreach_max", "_foreach_zero", "_pin_memory", "_reshape_copy", "_unsafe_view", "abs",
    "_chunk_cat", "all_gather_copy_in", "amax", "amin", "bernoulli", "cat", "chunk_cat", "clamp", "clamp_max",
    "clamp_min", "clone",
    "constant_pad_nd", "copy", "detach", "empty", "empty_like", "empty_permuted", "empty_strided", "expand_copy",
    "eye", "fill", "flip", "full", "full_like", "gather", "index", "index_put", "index_select", "lift", "lift_fresh",
    "masked_fill", "masked_scatter", "masked_select", "max", "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward", "max_pool3d_with_indices", "maximum", "min", "minimum", "neg", "new_empty",
    "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal", "ones", "ones_like", "rand", "rand_like",
    "randn", "randn_like", "reflection_pad1d", "reflection_pad2d", "relu", "repeat", "repeat_interleave",
    "replication_pad2d", "resize", "roll", "scalar_tensor", "scatter", "select_backward", "select_scatter", "set",
    "sign", "slice_backward", "slice_scatter", "sort", "split_with_sizes_copy", "stack", "threshold_backward", "topk",
    "tril", "triu", "uniform", "unsafe_split", "view_copy", "where", "zero", "zeros", "zeros_like",
))  # fmt: skip
_OURS = "plimsoll."
# Names of torch's lists of autocast, where the dispatcher's differ from them.
_LISTED_AS = {
    "_softmax": "softmax", "_log_softmax": "log_softmax", "_safe_softmax": "softmax",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "_fused_rms_norm": "rms_norm",
    "nll_loss_forward": "nll_loss", "nll_loss2d_forward": "nll_loss2d", "_cdist_forward": "cdist",
    "_ctc_loss": "ctc_loss", "cross_entropy_loss": "nll_loss",
}  # fmt: skip


_ATTENTIONS = ("scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")
_NAMES: tuple[tuple[Kind, tuple[str, ...]], ...] = (  # parts of names
    ("attention", _ATTENTIONS),
    ("normalization", _NORMALIZATIONS),
    ("softmax", ("softmax", "logsumexp")),
    ("embedding", ("embedding",)),
)
_OWN_CASTS = ("cast", "block_cast", "fp8_cast", "pack", "block_pack", "cast_out", "block_cast_out")


@functools.lru_cache(maxsize=8192)
def kind_of(facts: Facts) -> Kind:
    """Return an operation's kind; "custom" for those of others, known by name only."""
    base = facts.base
    plain = base.removesuffix("_backward").removesuffix("_forward")
    exact: tuple[tuple[bool, Kind], ...] = (
        (facts.collective, "collective"),
        (base in _FACTORS, "product"),
        (facts.cast or facts.name.startswith("prims.convert_element_type"), "cast"),
        (facts.name.startswith(_OURS) and base in _OWN_CASTS, "cast"),
        (plain in _LOSSES, "loss"),
        (base in _REDUCTIONS, "reduction"),
        (base in _EXACT or facts.view, "exact"),
    )
    exact_kind: Kind | None = next((kind for holds, kind in exact if holds), None)
    if exact_kind is None:
        exact_kind = next((kind for kind, parts in _NAMES if any(part in base for part in parts)), None)
    if exact_kind is not None:
        return exact_kind
    return "pointwise" if facts.name.startswith(("aten.", "prims.", _OURS, "inductor.")) else "custom"


def listed_as(base: str) -> str:
    """Return the name in lists of operations for one of the dispatcher."""
    return _LISTED_AS.get(base, base)


def factors(facts: Facts, given: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a product multiplies, or another's floating tensors."""
    named = factors_of_names(facts, given)
    chosen = given.values() if named is None else named
    tensors: list[Tensor] = []
    for value in chosen:
        tensors += [x for x in tensors_in(value) if named is not None or x.is_floating_point()]
    return tensors


def factors_of_names(facts: Facts, given: Mapping[str, Any]) -> list[Any] | None:
    """Return a product's multiplied arguments; None for other operations."""
    names = _FACTORS.get(facts.base)
    if names is None and kind_of(facts) == "attention":
        names = ("query", "key", "value")
    return None if names is None else [given[name] for name in names if name in given]


# -- entries: one for all equal operations, with the number of calls ---------------------------------------------------

Phase = Literal["forward", "recomputation", "backward", "optimizer"]
Where = Literal["eager", "compiled", "emulated"]
# Who asked for a cast: the script, torch's autocast (or Plimsoll's), code of torch such as `fully_shard`, a level or
# layer of Plimsoll, an emulation, the backward of another cast, or the operation that needed it.
Cause = Literal["script", "autocast", "torch", "level", "emulation", "backward", "operation"]


@dataclass(slots=True, eq=False, kw_only=True)
class Entry:
    """An operation as it ran at one place, on tensors of the same dtypes."""

    kind: Kind
    operation: str
    base: str
    phase: Phase
    place: Place
    operands: tuple[str, ...] = ()  # dtypes
    values: tuple[str, ...] = ()  # formats that the operands' values have, or are rounded to
    output: str = ""
    accumulate: str | None = None
    partial: str | None = None
    cause: Cause | None = None
    where: Where = "eager"
    device: str = "cpu"
    module: nn.Module | None = None
    path: str | None = None  # of a compiled operation's module, below the module whose code was compiled
    node: str | None = None  # of autograd
    part_of: str = ""  # the function of torch that was called, which may run several operations
    autocast: bool = False  # whether torch's autocast was on
    scripted: bool = False  # whether an operand was narrowed by code of the script
    weight: bool = False  # a cast of a weight by autocast
    mixed: bool = False  # whether operands of several dtypes were promoted
    of_parameters: bool = False  # a collective that reduces gradients of parameters
    rounded: bool = True  # False: compiled code keeps the result wide
    after_cast: bool = False  # of a cast: whether its operand comes straight from a cast of the script
    calls: int = 0
    bytes: int = 0
    cache_hits: int = 0  # operands that autocast had cast before

    @property
    def key(self) -> tuple[Any, ...]:
        """The fields that make two operations alike.

        An emulated operation's output is settled later.
        """
        place = self.place
        return (
            self.kind, self.operation, self.phase, place.file, place.line, self.path,
            id(self.module), self.operands, self.values, "" if self.where == "emulated" else self.output,
            self.accumulate, self.partial, self.cause, self.where, self.autocast, self.scripted, self.of_parameters,
            self.rounded, self.after_cast, self.weight,
        )  # fmt: skip


class Entries:
    """The entries of a step."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[Any, ...], Entry] = {}
        self.total = 0  # calls

    def add(self, entry: Entry, *, calls: int = 1, bytes: int = 0) -> Entry:  # noqa: A002
        """Count an operation; return the entry that it belongs to."""
        self.total += calls
        known = self._by_key.setdefault(entry.key, entry)
        known.calls += calls
        known.bytes += bytes
        return known

    def clear(self) -> None:
        """Forget all."""
        self._by_key.clear()

    def listed(self) -> list[Entry]:
        """Return the entries in the order in which they first ran."""
        return list(self._by_key.values())


# -- accumulators: formats that products multiply and add up in, by device and torch's switches ------------------------

# Nothing of this is in a tensor's dtype. The rules are torch's own:
#
# - CPU: oneDNN, MKL and torch's kernels add up 16-bit products in FP32 (tests/receipts/test_accumulators.py measures
#   it). FP32 operands are rounded to BF16 where `torch.backends.mkldnn` allows it and the processor has AMX; with
#   AVX-512 alone oneDNN leaves them as they are. The sums of `index_add` and of an embedding's gradient are kept in the
#   tensor's own dtype.
# - CUDA: tensor cores add up in FP32, unless `torch.backends.cuda.matmul.allow_fp16_accumulation` is set. Partial sums
#   of a split product may be added in 16 bits where `allow_*_reduced_precision_reduction` is set, as it is by default.
#   FP32 operands are rounded to TF32 where `fp32_precision` says so, as it does for convolutions by default.
# - Other devices: unknown.

_OWN_DTYPE = {  # sums that are kept in the dtype of the tensor
    "cpu": frozenset(("index_add", "embedding_dense_backward")),
    "cuda": frozenset(("index_add", "scatter_add", "index_put")),
}
_WIDE_SUMS = frozenset((
    "sum", "mean", "nansum", "linalg_vector_norm", "norm", "_foreach_norm", "var", "std", "var_mean", "std_mean",
    "cumsum",
))  # fmt: skip
_SMALLEST_BF16_PRODUCT = 16**3  # multiplications below which oneDNN is not asked


class Switches(NamedTuple):
    """torch's global switches that change products, as they are now."""

    cuda_matmul: str = "none"
    cuda_convolution: str = "none"
    cpu_matmul: str = "none"
    cpu_convolution: str = "none"
    fp16_accumulation: bool = False
    fp16_reduction: bool = False
    bf16_reduction: bool = False
    cpu_fp16_reduction: bool = False

    @classmethod
    def now(cls) -> "Switches":
        """Return the switches of this process. Reading them waits for no device."""
        backends: Any = torch.backends
        cuda, private = backends.cuda.matmul, _private()
        return cls(
            cuda_matmul=cuda.fp32_precision,
            cuda_convolution=backends.cudnn.conv.fp32_precision,
            cpu_matmul=backends.mkldnn.matmul.fp32_precision,
            cpu_convolution=backends.mkldnn.conv.fp32_precision,
            fp16_accumulation=bool(getattr(private, "_get_cublas_allow_fp16_accumulation", bool)()),
            fp16_reduction=_allows(private._get_cublas_allow_fp16_reduced_precision_reduction()),  # noqa: SLF001
            bf16_reduction=_allows(private._get_cublas_allow_bf16_reduced_precision_reduction()),  # noqa: SLF001
            cpu_fp16_reduction=bool(getattr(private, "_get_cpu_allow_fp16_reduced_precision_reduction", bool)()),
        )


def _private() -> Any:
    return torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def _allows(answer: Any) -> bool:
    """Return whether a reduction may be narrow; newer torch answers with a pair."""
    return bool(cast("tuple[bool, ...]", answer)[0] if isinstance(answer, tuple) else answer)


class Arithmetic(NamedTuple):
    """Arithmetic of a product: its operands' format and its accumulators."""

    multiplied: str | None = None  # format that FP32 operands are rounded to; None: they are not
    accumulate: str | None = None  # None: unknown
    partial: str | None = None  # format that partial sums may be added in


def product_arithmetic(
    base: str, dtype: torch.dtype, device: torch.device, size: int, switches: Switches, *, fast: bool = False
) -> Arithmetic:
    """Return how a device computes a product of `size` multiplications; oneDNN gets no small one.

    `fast`: whether an FP8 product may add up in fewer bits (`use_fast_accum`).
    """
    if not dtype.is_floating_point:
        return Arithmetic(accumulate="int32" if dtype in (torch.int8, torch.uint8) else None)
    convolution = base.removesuffix("_backward") in CONVOLUTIONS or base in CONVOLUTIONS
    if device.type == "cuda":
        return _on_cuda(dtype, device, switches, convolution=convolution, fast=fast)
    if device.type != "cpu":
        return Arithmetic()
    if dtype == torch.float64:
        return Arithmetic(accumulate="fp64")
    if dtype == torch.float16 and switches.cpu_fp16_reduction:
        return Arithmetic(partial="fp16")
    asked = switches.cpu_convolution if convolution else switches.cpu_matmul
    narrow = dtype == torch.float32 and asked == "bf16" and size >= _SMALLEST_BF16_PRODUCT and _has_bf16()
    return Arithmetic("bf16" if narrow else None, "fp32")


def _on_cuda(
    dtype: torch.dtype, device: torch.device, switches: Switches, *, convolution: bool, fast: bool
) -> Arithmetic:
    if dtype == torch.float64:
        return Arithmetic(accumulate="fp64")
    if dtype == torch.float32:
        asked = switches.cuda_convolution if convolution else switches.cuda_matmul
        return Arithmetic("tf32" if asked == "tf32" and _has_tf32(device) else None, "fp32")
    if dtype.itemsize == 1:
        return Arithmetic() if fast else Arithmetic(accumulate="fp32")
    if convolution:
        return Arithmetic(accumulate="fp32")
    if dtype == torch.float16 and switches.fp16_accumulation:
        return Arithmetic(accumulate="fp16")
    narrow = switches.fp16_reduction if dtype == torch.float16 else switches.bf16_reduction
    return Arithmetic(None, "fp32", get_element(dtype, "receipt").name if narrow else None)


def sum_accumulator(base: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the format that a reduction adds up in; None where it is unknown."""
    if dtype == torch.float64:
        return "fp64"
    if dtype.itemsize not in (2, 4) or device.type not in _OWN_DTYPE:
        return None
    if base in _OWN_DTYPE[device.type]:
        return get_element(dtype, "receipt").name
    return "fp32" if base in _WIDE_SUMS else None


def _has_tf32(device: torch.device) -> bool:
    """Return whether the device multiplies in TF32; fake ones without CUDA do."""
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def _has_bf16() -> bool:
    """Return whether oneDNN may multiply FP32 operands in BF16 on this processor."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", bool)
    return bool(torch.backends.mkldnn.is_available()) and bool(has_amx())
