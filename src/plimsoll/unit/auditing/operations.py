"""Operations that an audit records: their names and call sites.

Python's own stack has the module that runs, the user's line, and the operation with factors that a call is part of. So
nothing has to be hooked. An operation with its factors is one call of a function of `unit.functional`. In a converted
model it is one line of a module's code.
"""

import functools
import linecache
import os
import re
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_FUNCTIONAL = str(Path(__file__).parents[1] / "functional") + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
_INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

_GENERATED = "<plimsoll.unit.convert "  # start of the file names of converted models' code
_SCALES_ITSELF = re.compile(r"\s*(\w+) = ((?:scaled|sized)\(\1, |\1 \* )")

_CALLS, _FUNCTION, _LINE, _USER, _OTHER = "calls a module", "a function", "a line", "the user's", "other"


@dataclass(slots=True)
class CallSite:
    """Place that an operation was called from.

    Attributes:
        module: Innermost module that runs.
        source: Line of the user's code, "file:line".
        call: Frame of the function of `unit.functional`, or of the converted module's code, that the call is part of.
        function: Name of that function.
        line: Line of that code.
    """

    module: nn.Module | None = None
    source: str | None = None
    # The frame itself, not its id: a new frame may get the id of one that is gone.
    call: FrameType | None = None
    function: str = ""
    line: int = 0

    def part_of(self, other: "CallSite") -> bool:
        """Return whether both are parts of one operation and its factors."""
        if self.call is None or self.call is not other.call:
            return False
        return self.line == other.line or (self.line == other.line + 1 and self._scales_itself())

    def _scales_itself(self) -> bool:
        """Return whether the line multiplies the value of the line before by its factor."""
        assert self.call is not None
        return bool(_SCALES_ITSELF.match(linecache.getline(self.call.f_code.co_filename, self.line)))


def find_call_site(until: CodeType) -> CallSite:
    """Return the call site of the current operation, below the frame of `until`."""
    site = CallSite()
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind is _USER:
            if site.source is None:
                site.source = f"{code.co_filename}:{frame.f_lineno}"
        elif kind is _FUNCTION or kind is _LINE:
            if site.module is None:
                _take_call(site, frame, of_line=kind is _LINE)
        elif kind is _CALLS and code.co_name == "_call_impl" and site.module is None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                site.module = module
        frame = frame.f_back
    return site


def _take_call(site: CallSite, frame: FrameType, *, of_line: bool) -> None:
    site.call, site.function, site.line = frame, frame.f_code.co_name, frame.f_lineno if of_line else 0
    if of_line:
        site.function = ""
        site.source = site.source or f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    """Return whose file it is."""
    if file.startswith(_TORCH):
        return _CALLS if file.endswith(os.path.join("nn", "modules", "module.py")) else _OTHER  # noqa: PTH118
    if file.startswith(_FUNCTIONAL):
        return _FUNCTION
    if file.startswith(_GENERATED):
        return _LINE
    library = file.startswith(_LIBRARIES) and not file.startswith(_INSTALLED)
    if library or file.startswith(("<frozen", "<eval_with_key")):
        return _OTHER
    return _OTHER if file.startswith(_OURS) else _USER


# Python's operators, and functions whose name in Python is not that in torch's dispatcher.
_OTHER_NAMES = {
    "invert": "bitwise_not",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "cross_entropy_loss": "cross_entropy",
    "residual_add": "add",
    "linear_readout": "linear",
    "concat": "cat",
    "concatenate": "cat",
    "convolution": "conv",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "nll_loss_nd": "nll_loss",
    "special_softmax": "softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "_native_batch_norm_legit": "batch_norm",
    "Scaled": "scaled",
    "Sized": "scaled",
    "Fp8Product": "linear",
    "feature_dropout": "dropout2d",
}
_OPERATORS = frozenset(("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "div"))

# Operations whose results contain the values of their inputs: views, copies, joins, codes.
_MOVES = frozenset(
    """
    adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat chunk
    clone column_stack constant_pad_nd contiguous copy detach diagonal dsplit dstack expand expand_as flatten flip
    fliplr flipud fp8_cast gather getitem hsplit hstack index_select masked_select meshgrid moveaxis movedim narrow
    pad permute pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave reshape reshape_as residual_split
    resolve_conj resolve_neg roll rot90 select setitem slice split split_with_sizes squeeze stack swapaxes swapdims
    t take take_along_dim tensor_split tile transpose unbind unflatten unfold unsqueeze view view_as vsplit vstack
    zero_pad2d
    """.split()
)
# Operations whose results do not depend on the values of their inputs.
_MAKERS = ("new_", "zeros", "ones", "empty", "full", "rand", "arange", "linspace", "eye", "tensor", "as_tensor")
# Operations that the factors around another one consist of. A product may be one too.
_FACTORS = ("scaled", "mul")
# An autograd function of torch's checkpointing, which contains no values.
BOOKKEEPING = frozenset(("_NoopSaveInputs",))


@functools.lru_cache(maxsize=4096)
def operation_of(func: Any) -> str:
    """Return the name of a torch function, which does not depend on how it was called.

    >>> import torch
    >>> [operation_of(f) for f in (torch.Tensor.add_, torch.Tensor.__rsub__, torch.ops.aten.linear.default)]
    ['add', 'sub', 'linear']
    """
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # an attribute such as x.mT: the name is on the descriptor
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    name = name.split(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("r", "i") and name[1:] in _OPERATORS:
            name = name[1:]
    else:
        name = name.rstrip("_")
    return _OTHER_NAMES.get(name, name)


# A torch function has one name however it is called: `x + y`, `x.add_(y)`, `torch.add` and `aten.add.Tensor` are all
# "add". So the operations of a model are found again in the converted one.
def canonical(name: str) -> str:
    """Return torch's name of what a function of `unit.functional` computes."""
    return _OTHER_NAMES.get(name.strip("_"), name.strip("_"))


def moves(operation: str) -> bool:
    """Return whether the operation only moves values, or makes them of none."""
    return operation in _MOVES or operation.startswith(_MAKERS)


def factor_rank(operation: str) -> int:
    """Return a rank that is low for likely factors of another operation in a line."""
    return _FACTORS.index(operation) if operation in _FACTORS else len(_FACTORS)
