"""What operations are called, and which of them compute nothing.

A torch function has one name however it is called: ``x + y``, ``x.add_(y)``, ``torch.add`` and ``aten.add.Tensor`` are
all "add". So the operations of a model are found again in the model that was made of it.
"""

import functools
from typing import Any

# Python's operators, and functions that Python calls otherwise than torch's dispatcher does.
_OTHER_NAMES = {
    "invert": "bitwise_not", "truediv": "div", "true_divide": "div", "divide": "div",
    "multiply": "mul", "subtract": "sub", "cross_entropy_loss": "cross_entropy", "residual_add": "add",
    "linear_readout": "linear", "concat": "cat", "concatenate": "cat", "convolution": "conv", "_softmax": "softmax",
    "_log_softmax": "log_softmax", "nll_loss_nd": "nll_loss", "special_softmax": "softmax",
    "native_layer_norm": "layer_norm", "native_group_norm": "group_norm", "native_dropout": "dropout",
    "_native_batch_norm_legit": "batch_norm", "Scaled": "scaled", "Sized": "scaled",
    "Fp8Product": "linear", "feature_dropout": "dropout2d",
}  # fmt: skip
_OPERATORS = frozenset(("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "div"))

# The values of what these give are those of their inputs, elsewhere or again: views, copies, joins, codes.
_MOVES = frozenset((
    "adjoint", "alias", "as_strided", "atleast_1d", "atleast_2d", "atleast_3d", "block_diag", "broadcast_tensors",
    "broadcast_to", "cat", "chunk", "clone", "column_stack", "constant_pad_nd", "contiguous", "copy", "detach",
    "diagonal", "dsplit", "dstack", "expand", "expand_as", "flatten", "flip", "fliplr", "flipud", "fp8_cast",
    "gather", "getitem", "hsplit", "hstack", "index_select", "masked_select", "meshgrid", "moveaxis", "movedim",
    "narrow", "pad", "permute", "pixel_shuffle", "pixel_unshuffle", "ravel", "repeat", "repeat_interleave", "reshape",
    "reshape_as", "residual_split", "resolve_conj", "resolve_neg", "roll", "rot90", "select", "setitem", "slice",
    "split", "split_with_sizes", "squeeze", "stack", "swapaxes", "swapdims", "t", "take", "take_along_dim",
    "tensor_split", "tile", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "vsplit",
    "vstack", "zero_pad2d",
))  # fmt: skip
# What these give holds nothing of their inputs' values.
_MAKERS = ("new_", "zeros", "ones", "empty", "full", "rand", "arange", "linspace", "eye", "tensor", "as_tensor")
# What the factors around an operation are made with: a product, too, may be one.
_FACTORS = ("scaled", "mul")
# Checkpointing's own, which holds no values.
BOOKKEEPING = frozenset(("_NoopSaveInputs",))


@functools.lru_cache(maxsize=4096)
def operation_of(func: Any) -> str:
    """The name of a torch function, without how it was called.

    >>> import torch
    >>> [operation_of(f) for f in (torch.Tensor.add_, torch.Tensor.__rsub__, torch.ops.aten.linear.default)]
    ['add', 'sub', 'linear']
    """
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # an attribute: x.mT
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    name = name.split(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("r", "i") and name[1:] in _OPERATORS:
            name = name[1:]
    else:
        name = name.rstrip("_")
    return _OTHER_NAMES.get(name, name)


def canonical(name: str) -> str:
    """The name of a function of our own, as torch calls what it does."""
    return _OTHER_NAMES.get(name.strip("_"), name.strip("_"))


def moves(operation: str) -> bool:
    """Whether the operation computes nothing: it only moves values, or makes them of none."""
    return operation in _MOVES or operation.startswith(_MAKERS)


def factor_rank(operation: str) -> int:
    """How surely it is the operation itself, among those in one line, and no factor of it."""
    return _FACTORS.index(operation) if operation in _FACTORS else len(_FACTORS)
