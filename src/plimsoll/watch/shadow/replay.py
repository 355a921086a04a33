"""A module's forward and backward again in FP32 or FP64, without a trace left.

Everything that a forward reads and changes is borrowed and put back, whatever happens:

- parameters are replaced by fresh leaves (aliases of wide ones, wide copies of narrower ones): no gradient and no hook
  of the real ones is touched; buffers by copies of what they were before the forward;
- each module's attributes: one that counts its calls, or keeps its last output, has what it had;
- the random generators of Python, NumPy and torch;
- autocast, also where the model itself enters it, and casts to narrower dtypes that it writes out: they give the wide
  one;
- emulation and FP8 layers, which ask `active_casts`: in a reference nothing is rounded;
- TF32 is off, and compiled parts run eagerly.
"""

import contextlib
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.thread_casts import without_rounding

# -- random numbers in a repetition: the same that the real step had ---------------------------------------------------

ALIKE = frozenset({"cpu", "meta"})  # devices whose dropout does not depend on the dtype


class RandomState:
    """Present state of Python's, NumPy's and torch's generators. Waits for no device."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the one that models use)
        places = {torch.device("cpu"), *(device for device in devices if device.type != "meta")}
        self.states = {device: generator_state(device) for device in places}

    def matches(self, other: "RandomState") -> bool:
        """Return True if torch's generators are in the same state."""
        return all(torch.equal(state, other.states[device]) for device, state in self.states.items())

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for device, state in self.states.items():
            set_generator_state(device, state)


def generator_state(device: torch.device) -> Tensor:
    """The state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    generator: Any = torch.get_device_module(device)
    return generator.get_rng_state() if device.type == "mps" else generator.get_rng_state(device)


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Sets the state of a device's generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    generator: Any = torch.get_device_module(device)
    _ = generator.set_rng_state(state) if device.type == "mps" else generator.set_rng_state(state, device)


# Setting the generators back is enough on a CPU, whose draws do not depend on the dtype. On a GPU dropout's do: it
# takes as many numbers at a time as values fit into its widest load, and FP16 gets another mask than FP32. So the
# forward is run once more as it was, without gradients, only to note each dropout's dtype and generator state; in FP32
# the mask is then drawn in that dtype from that state. A checkpoint's recomputation, which comes out of order, finds
# its dtype by the state that the checkpoint has set.
class Dropouts(TorchFunctionMode):
    """Random states of a forward's dropouts: recorded inside, used again by `again`."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[torch.dtype, Tensor]] = []
        self._by_state: dict[bytes, torch.dtype] = {}
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_dropout(func, kwargs):
            state = generator_state(args[0].device)
            self._noted.append((args[0].dtype, state))
            self._by_state[state.numpy().tobytes()] = args[0].dtype
        return func(*args, **kwargs)

    def again(self, func: Any, x: Tensor, p: float, *, inplace: bool) -> Tensor:
        """The dropout of x with the mask that the real step has drawn there."""
        if backward_running() != -1:
            dtype = self._by_state.get(generator_state(x.device).numpy().tobytes(), x.dtype)
        elif self._next < len(self._noted):
            dtype, state = self._noted[self._next]
            self._next += 1
            set_generator_state(x.device, state)
        else:
            dtype = x.dtype
        drawn = func(torch.ones_like(x, dtype=dtype, requires_grad=False), p=p, training=True)
        factor = (drawn != 0).to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
        return x.mul_(factor) if inplace else x * factor


def _is_dropout(func: Any, kwargs: Any) -> bool:
    """Return True if a call drops anything."""
    return func is functional.dropout and bool(kwargs.get("training", True))


# -- the repetition ----------------------------------------------------------------------------------------------------

_MISSING = object()
_DRAWS = {torch.rand, torch.randn, torch.rand_like, torch.randn_like}
_NARROWING = {Tensor.half: torch.float16, Tensor.bfloat16: torch.bfloat16, Tensor.float: torch.float32}


def is_narrow(dtype: torch.dtype, wide: torch.dtype = torch.float32) -> bool:
    """Return True for a floating dtype of fewer bits than `wide`."""
    return dtype.is_floating_point and dtype.itemsize < wide.itemsize


def widened(x: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """A detached copy, in the wide dtype where it was narrower."""
    x = x.detach()
    return x.to(wide) if is_narrow(x.dtype, wide) else x.clone()


def as_wide(x: Tensor, wide: torch.dtype) -> Tensor:
    """The tensor itself, or in the wide dtype where it was narrower; a leaf stays one."""
    if not is_narrow(x.dtype, wide):
        return x
    return x.detach().to(wide).requires_grad_(x.requires_grad) if x.is_leaf else x.to(wide)


def leaf(p: Tensor, wide: torch.dtype = torch.float32) -> Tensor:
    """Return a parameter's stand-in without hooks: a wide copy, or the same memory."""
    x = p.detach()
    return (x.to(wide) if is_narrow(x.dtype, wide) else x).requires_grad_(p.requires_grad)


def tensors_of(inputs: Any) -> list[Tensor]:
    """The tensors in a call's arguments."""
    return [x for x in pytree.tree_leaves(inputs) if isinstance(x, Tensor)]


def fresh_inputs(inputs: Any, wide: torch.dtype | None = torch.float32) -> Any:
    """Return the arguments with copied tensors, leaves where gradients are asked.

    With `wide` as None they keep their dtypes.
    """
    made: dict[int, Tensor] = {}

    def fresh(x: Tensor) -> Tensor:
        if id(x) not in made:
            copied = x.detach().clone() if wide is None else widened(x, wide)
            made[id(x)] = copied.requires_grad_(x.requires_grad)
        return made[id(x)]

    return pytree.tree_map_only(Tensor, fresh, inputs)


def buffers_of(root: nn.Module) -> list[dict[str, Tensor]]:
    """Copies of the buffers, module by module."""
    made: dict[int, Tensor] = {}
    buffers: list[dict[str, Tensor]] = []
    for module in root.modules():
        own = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        buffers.append({name: made.setdefault(id(b), b.detach().clone()) for name, b in own.items()})
    return buffers


@contextlib.contextmanager
def borrowed(
    root: nn.Module,
    leaves: Mapping[int, Tensor],
    buffers: Sequence[Mapping[str, Tensor]],
    wide: torch.dtype = torch.float32,
) -> Generator[None]:
    """Give the module these leaves and buffers inside the context, its own after it.

    Leaves go by the parameters' identity. With leaves, narrower buffers are wide too.
    """
    modules = list(root.modules())
    live = [vars(m) for m in modules] + [vars(m)[kind] for m in modules for kind in ("_parameters", "_buffers")]
    before = [dict(attributes) for attributes in live]
    try:
        for module, theirs in zip(modules, buffers, strict=True):
            _lend(module, leaves, theirs, wide)
        yield
    finally:
        for attributes, former in zip(live, before, strict=True):
            _put_back(attributes, former)


def _lend(module: nn.Module, leaves: Mapping[int, Tensor], buffers: Mapping[str, Tensor], wide: torch.dtype) -> None:
    inside = cast("Any", module)
    for name, p in inside._parameters.items():  # noqa: SLF001
        if p is not None:
            inside._parameters[name] = leaves.get(id(p), p)  # noqa: SLF001
    for name, b in buffers.items():
        inside._buffers[name] = widened(b, wide) if leaves else b.clone()  # noqa: SLF001
    # Hooks on backwards, of the user's: they would be called for one that is none of the training's.
    module.__dict__.update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())


def _put_back(found: dict[str, Any], kept: dict[str, Any]) -> None:
    for name in found.keys() - kept.keys():
        del found[name]
    for name, value in kept.items():
        if found.get(name, _MISSING) is not value:
            found[name] = value


@contextlib.contextmanager
def in_reference(
    devices: Iterable[torch.device], dropouts: Dropouts | None, wide: torch.dtype = torch.float32
) -> Generator[None]:
    """Inside, this thread computes in the wide dtype, eagerly, and with gradients."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_reference(wide))
        stack.enter_context(_without_tf32())
        stack.enter_context(eagerly())
        for kind in _kinds(devices):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_autocast_stays_off())
        stack.enter_context(_Wide(dropouts, wide))
        stack.enter_context(torch.enable_grad())
        yield


@contextlib.contextmanager
def as_it_was(autocast: Mapping[str, tuple[bool, torch.dtype]]) -> Generator[None]:
    """Compute as the real step did inside the context, but eagerly, without gradients."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(eagerly())
        for kind, (enabled, dtype) in autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        stack.enter_context(torch.no_grad())
        yield


def autocast_of(devices: Iterable[torch.device]) -> dict[str, tuple[bool, torch.dtype]]:
    """Return autocast's state and its dtype for each kind of device."""
    return {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds(devices)}


def draws_by_dtype(devices: Iterable[torch.device]) -> bool:
    """Return True if dropout depends on the dtype on one of the devices."""
    return any(device.type not in ALIKE for device in devices)


def _kinds(devices: Iterable[torch.device]) -> list[str]:
    return sorted({"cpu", *(device.type for device in devices)} - {"meta"})


@contextlib.contextmanager
def _as_reference(wide: torch.dtype) -> Generator[None]:
    default = torch.get_default_dtype()
    with without_rounding(wide):
        try:
            if wide == torch.float64:  # what a model makes without a dtype meets wide tensors in products
                torch.set_default_dtype(wide)
            yield
        finally:
            torch.set_default_dtype(default)


@contextlib.contextmanager
def _without_tf32() -> Generator[None]:
    """Inside, FP32 products are not computed from operands of fewer bits."""
    backends: Any = torch.backends
    kinds = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    before = [(kind, kind.fp32_precision) for kind in kinds if hasattr(kind, "fp32_precision")]
    try:
        for kind, _ in before:
            kind.fp32_precision = "ieee"
        yield
    finally:
        for kind, precision in before:
            kind.fp32_precision = precision


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Inside, nothing compiled runs."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


@contextlib.contextmanager
def _autocast_stays_off() -> Generator[None]:
    """Inside, autocast that this thread enters is entered disabled."""
    original, thread = torch.autocast.__enter__, threading.get_ident()

    def enter(self: Any) -> Any:
        if threading.get_ident() != thread:
            return original(self)
        wanted, self._enabled = self._enabled, False
        try:
            return original(self)
        finally:
            self._enabled = wanted

    torch.autocast.__enter__ = enter
    try:
        yield
    finally:
        torch.autocast.__enter__ = original


class _Wide(TorchFunctionMode):
    """Mode that gives the wide dtype for narrower ones, and the real step's masks."""

    def __init__(self, dropouts: Dropouts | None, wide: torch.dtype) -> None:
        super().__init__()
        self._dropouts, self._wide = dropouts, wide

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dropouts is not None and _is_dropout(func, kwargs):
            return self._dropouts.again(func, args[0], kwargs.get("p", 0.5), inplace=kwargs.get("inplace", False))
        if func in _NARROWING and is_narrow(_NARROWING[func], self._wide):
            return args[0].to(self._wide)
        if func in _DRAWS:  # the same numbers as in the real step
            asked = {"dtype": torch.float32} if self._wide == torch.float64 else {}
            drawn = func(*args, **{**asked, **kwargs})
            return drawn.to(self._wide) if is_narrow(drawn.dtype, self._wide) else drawn
        for x in (*args, *kwargs.values()):  # a plain loop: a model's every look at a shape comes here
            if type(x) is torch.dtype and func is not Tensor.view and is_narrow(x, self._wide):
                break
        else:
            return func(*args, **kwargs)
        wide = {name: self._wide if self._asks(x) else x for name, x in kwargs.items()}
        return func(*(self._wide if self._asks(x) else x for x in args), **wide)

    def _asks(self, x: Any) -> bool:
        return type(x) is torch.dtype and is_narrow(x, self._wide)


# -- the bytes that a twin needs, and the bytes that are free ----------------------------------------------------------

_MEMINFO = Path("/proc/meminfo")


def twin_bytes(parameters: Iterable[Tensor], wide: torch.dtype = torch.float32) -> dict[torch.device, int]:
    """Return the bytes of a twin's copied weights and its gradients, by device.

    Its activations come on top: those of one step in the wide dtype.
    """
    sizes: dict[torch.device, int] = {}
    for p in parameters:
        sharded = hasattr(p, "placements")
        copied = is_narrow(p.dtype, wide) or sharded
        size = p.numel() * max(wide.itemsize, p.dtype.itemsize)
        sizes[p.device] = sizes.get(p.device, 0) + size * (copied + p.requires_grad)
    return sizes


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that is free on a device. None where nobody says."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu":
        return None
    if _MEMINFO.exists():
        lines = _MEMINFO.read_text().splitlines()
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    names: dict[str, int] = os.sysconf_names if hasattr(os, "sysconf_names") else {}
    if "SC_AVPHYS_PAGES" not in names:
        return None
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def missing_memory(parameters: Iterable[Tensor], wide: torch.dtype = torch.float32) -> str | None:
    """Return why a twin does not fit, with the bytes that it needs; None where it may."""
    for device, needed in twin_bytes(parameters, wide).items():
        free = free_bytes(device)
        if free is not None and needed > free:
            return (
                f"its twin needs {needed:,} bytes on {device} for weights and gradients, and {free:,} are free: watch "
                "a smaller model of the same kind, or free memory"
            )
    return None
