"""Placement of formats in a model, and the casts at borders between formats.

A level keeps the weights in one format, and those of normalization layers perhaps in another. A policy may name further
modules. Parameters and buffers are cast in place, so a Parameter stays the object that the optimizer has. A module
whose format differs from its caller's casts its floating inputs and outputs. The root takes inputs of any floating
dtype and returns FP32, so that losses are computed in FP32.
"""

import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.emulate.module_regions import callers, cast_floating, has_forward, named_modules
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision.levels.catalogue import DTYPES
from plimsoll.watch.taps.compiled_taps import inlined_only

# The common base of batch and instance norms of any dimension is torch's own.
_NORMS: tuple[type[nn.Module], ...] = (
    cast("Any", nn.modules.batchnorm)._NormBase,  # noqa: SLF001
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
# Not their subclasses, whose forward may do more than normalize.
_MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_NORM_ENDINGS = ("norm", "norm1d", "norm2d", "norm3d")


def is_norm(module: nn.Module) -> bool:
    """Return whether it is one of torch's norms, or a leaf module named like one."""
    named_so = type(module).__name__.lower().endswith(_NORM_ENDINGS)
    return isinstance(module, _NORMS) or (named_so and next(iter(module.children()), None) is None)


def module_formats(root: nn.Module, weights: str, norms: str, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the format of every module by its qualified name (the root's is empty).

    A rule for the module itself counts first, then that for norms; else a module has the format of the one around it.
    """
    formats: dict[str, str] = {}
    for name, module in named_modules(root):
        around = formats[name.rpartition(".")[0]] if name else weights
        formats[name] = rules.get(name) or (norms if is_norm(module) else around)
    return formats


class CastInputs:
    """Forward pre-hook that casts floating arguments to this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return a module's inputs, in its dtype."""
        return cast_floating(args, self.dtype), cast_floating(kwargs, self.dtype)


class CastOutputs:
    """Forward hook that casts floating outputs to this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (a hook's parameters are torch's to choose)
        """Return a module's output, in the dtype outside."""
        return cast_floating(output, self.dtype)


inlined_only(CastInputs.__call__, CastOutputs.__call__)


def has_borders(module: nn.Module) -> bool:
    """Return whether the module casts its inputs or outputs."""
    inside = cast("Any", module)
    hooks: list[Any] = [*inside._forward_pre_hooks.values(), *inside._forward_hooks.values()]  # noqa: SLF001
    return any(isinstance(hook, CastInputs | CastOutputs) for hook in hooks)


class Placement:
    """Model with parameters in the formats of a level, until `widen`."""

    def __init__(self, root: nn.Module, formats: Mapping[str, str]) -> None:
        self.formats = dict(formats)
        self._root = weakref.ref(root)
        self._old_buffers: list[tuple[nn.Module, str, Tensor]] = []
        wanted = _wanted_dtypes(root, formats)
        _check_castable(root, wanted)
        self._cast(root, wanted)
        in_16_bits = any(name != "fp32" for name in formats.values())
        self._handles = list(self._borders(root)) if in_16_bits else []

    def remove(self) -> None:
        """Remove the casts at the borders."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # The inverse restores the old FP32 bits of buffers that did not change. Parameters get theirs from the masters.
    def widen(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Give each parameter its FP32 value, or its own widened, and remove the hooks."""
        self.remove()
        root = self._root()
        if root is None:
            return
        for p in root.parameters():
            if p.is_floating_point():
                p.grad = None
                p.data = values[p].to(p.device, torch.float32) if p in values else p.data.float()
        for module, name, old in self._old_buffers:
            now: Tensor = getattr(module, name)
            as_it_was = not now.is_meta and old.to(now.dtype).equal(now)
            setattr(module, name, old if as_it_was else now.to(old.dtype))
        self._old_buffers.clear()

    def _cast(self, root: nn.Module, wanted: Mapping[nn.Parameter, torch.dtype]) -> None:
        for p, dtype in wanted.items():
            if p.dtype != dtype:
                p.grad = None
                p.data = p.data.to(dtype)
        for name, module in named_modules(root, twice=False):
            dtype = DTYPES[self.formats[name]]
            for key, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point() and buffer.dtype != dtype:
                    self._old_buffers.append((module, key, buffer))
                    setattr(module, key, buffer.to(dtype))

    def _borders(self, root: nn.Module) -> Any:
        caller = callers(root)
        for name, module in named_modules(root, twice=False):
            inside = self.formats[name]
            outside = self.formats[caller[name]] if name else None
            if inside != outside and has_forward(module) and not _mixes(module, inside, outside):
                # First to enter and last to leave, so that other hooks get the dtype that the module computes in.
                yield module.register_forward_pre_hook(CastInputs(DTYPES[inside]), prepend=True, with_kwargs=True)
                yield module.register_forward_hook(CastOutputs(DTYPES[outside or "fp32"]))


# A batch norm in FP32 among 16-bit modules needs no such casts. Torch's takes 16-bit values with FP32 parameters,
# computes in FP32 and rounds once, so that nothing is saved for the backward in FP32.
def _mixes(module: nn.Module, inside: str, outside: str | None) -> bool:
    """Return whether the module accepts 16-bit values and computes in FP32."""
    return type(module) in _MIXING and inside == "fp32" and outside in ("fp16", "bf16")


def _wanted_dtypes(root: nn.Module, formats: Mapping[str, str]) -> dict[nn.Parameter, torch.dtype]:
    wanted: dict[nn.Parameter, torch.dtype] = {}
    first: dict[nn.Parameter, str] = {}
    for name, module in named_modules(root):
        for key, p in module.named_parameters(recurse=False):
            if not p.is_floating_point():
                continue
            full, dtype = f"{name}.{key}".lstrip("."), DTYPES[formats[name]]
            if wanted.setdefault(p, dtype) != dtype:
                raise ArgumentError(
                    f"prepare: expected modules that share a parameter to have one format; got {first[p]} in "
                    f"{wanted[p]} and {full} in {dtype}. Name both in the policy, with one format."
                )
            first.setdefault(p, full)
    return wanted


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the dtype can represent the values ("meta" tensors have none)."""
    return values.is_meta or bool(values.to(dtype).isfinite().all())


def _check_castable(root: nn.Module, wanted: Mapping[nn.Parameter, torch.dtype]) -> None:
    for name, p in root.named_parameters():
        dtype = wanted.get(p)
        if dtype is None or p.dtype in (torch.float32, dtype):
            if dtype is not None and p.dtype != dtype and not _fits(p.detach(), dtype):
                raise UnsupportedTensorError(
                    f"prepare: expected weights that {dtype} can hold; got {name} with |weight| up to "
                    f"{p.detach().abs().max().item():.4g}. Choose a bf16 level, or keep its "
                    "module in FP32 by the policy."
                )
            continue
        raise UnsupportedTensorError(
            f"prepare: expected parameters in float32, from which the level casts; got {name} in {p.dtype}. Give the "
            "model as it was before it was cast."
        )
