"""Precision level for an unchanged script: ``plimsoll run --precision``.

Only levels that keep weights and optimizers as they are can be applied this way. The model's `forward` is wrapped,
because a forward hook does not run when a KeyboardInterrupt leaves the call. A hook after all others converts 16-bit
outputs to FP32, so a loss outside of the model is computed in FP32. `transparent_scaling` scales the loss.
"""

import contextlib
import functools
import gc
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.precision.levels.arithmetic import Arithmetic, device_of, has_tf32, tf32
from plimsoll.precision.levels.catalogue import ALIASES, LEVELS, Level
from plimsoll.precision.levels.distributed import is_fully_sharded
from plimsoll.precision.levels.fp8_layers import Layers
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.scripts.transparent_scaling import TransparentScaler, patched_backward
from plimsoll.precision.training.loop import PREPARED
from plimsoll.rounding.casting import is_sharded
from plimsoll.text import clause
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.names import unwrapped
from plimsoll.watch.taps.module_taps import ModuleHook


def module_to_wrap(model: nn.Module) -> nn.Module:
    """Return the module to wrap: the one inside DDP, but none inside compiled code."""
    inner = model.__dict__.get("_modules", {})
    if "_orig_mod" in inner:
        return model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return module_to_wrap(inner["module"])
    return model


def patched(owner: Any, name: str, run: Callable[..., Any]) -> Callable[[], None]:
    """Replace a class's method by one that calls `run`. Return the undo function."""
    original = owner.__dict__[name]

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, args, kwargs)

    return torch_hooks.replaced(owner, name, method)


class Forward:
    """Replacement of a module's `forward`, not in its copies and pickles."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        self._module, self._call = weakref.ref(module), call
        self._own: Any = module.__dict__.get("forward")  # another library's wrapper
        module.__dict__["forward"] = self  # setattr of a compiled module would set it on the module inside

    @property
    def __wrapped__(self) -> Any:  # inspect.signature follows it
        module = self._module()
        return self._own if self._own is not None or module is None else _plain(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under the level."""
        return self._call(self.__wrapped__, args, kwargs)

    def remove(self) -> None:
        """Restore the module's own method, unless another library has wrapped this one."""
        module = self._module()
        if module is not None and module.__dict__.get("forward") is self:
            if self._own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._module()
        return self._own if self._own is not None else _plain(memo.get(id(module), module))

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        module: Any = self._module()
        if self._own is not None:
            return getattr, (_Holder(self._own), "method")
        return getattr, (module, "forward")  # while the copy has no attributes yet, this is its class's


class _Holder:
    def __init__(self, method: Any) -> None:
        self.method = method


def _plain(module: Any) -> Any:
    return types.MethodType(cast("Any", type(module)).forward, module)


class Widen(ModuleHook):
    """Hook that converts a module's 16-bit outputs to FP32."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002
        """Return the output with 16-bit tensors widened."""
        return pytree.tree_map_only(Tensor, widened, output)


def widened(x: Tensor) -> Tensor:
    """Return a 16-bit tensor in FP32, and any other unchanged."""
    return x.float() if x.dtype in SIXTEEN_BIT else x


_SCRIPT = "the script's own precision"
UNCHANGED = tuple(level.name for level in LEVELS.values() if not level.casts)


def level_for_scripts(name: str) -> Level:
    """Return a level that an unchanged script can train at, or raise."""
    key = ALIASES.get(name.lower(), name.lower())
    if key in UNCHANGED:
        return LEVELS[key]
    if key not in LEVELS:
        why = "which is not a level"
        remedy = "A plan or a schedule needs plimsoll.prepare in the script"
    else:
        why = "which casts weights and wraps the optimizer, so that the script's loop changes"
        remedy = "Use plimsoll.prepare in the script"
    raise ArgumentError(
        f"run: expected --precision to be a level that needs no change of the script's loop, {', '.join(UNCHANGED)}; "
        f"got {name!r}, {why}. {remedy}."
    )


class ScriptPrecision:
    """Models of one process at one level.

    `report` receives one line if the level is not applied. `decided` is True once a level was applied or refused.
    """

    def __init__(self, precision: str, report: Callable[[str], None]) -> None:
        self._level, self._report = level_for_scripts(precision), report
        self._acts = self._level.operations is not None or self._level.matmuls is not None
        self.decided = False
        self._over = False
        self._ours = False  # set while we enter a context of torch ourselves
        self._open: list[contextlib.ExitStack] = []  # one for each call that is running
        self._callbacks: list[Callable[[str], None]] = []
        self._undo: list[Callable[[], None]] = []
        self._unseen = TransparentScaler(self._refuse) if self._level.scaled else None

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer that the script has created."""
        if self._unseen is not None and not self._over:
            self._unseen.gate(optimizer)

    def begin(self, model: nn.Module, called: nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> str:
        """Apply the level before a model's first call. Return the active precision.

        `called` is the module that is being called, or None if no call was seen.
        """
        if self._over:
            return _SCRIPT
        self.decided = True
        try:
            why = self._why_not(model, called, optimizers)
            if why is None:
                self._put(model)
        except (PlimsollError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
        if why is not None:
            self._refuse(why, unwrapped(model))
            return _SCRIPT
        return self._level.name

    def on_refusal(self, callback: Callable[[str], None]) -> None:
        """Call `callback` too if the level is refused later."""
        self._callbacks.append(callback)

    def end(self) -> None:
        """Undo everything."""
        self._over = True
        while self._open:
            self._open.pop().close()
        if self._unseen is not None:
            self._unseen.end()
        while self._undo:
            self._undo.pop()()

    # -- refusals ------------------------------------------------------------------------------------------------------

    # If the script chooses a precision itself (autocast, a scaler), or if the level cannot be applied, everything is
    # undone at once, one line reports the reason, and the script continues unchanged.
    def _refuse(self, why: str, root: nn.Module | None = None) -> None:
        if self._over:
            return
        self.end()
        whose = "" if root is None else f" for {type(root).__name__}"
        line = f"--precision {self._level.name} is refused{whose}: {clause(why)}; the script continues unchanged"
        self._report(line)
        for callback in self._callbacks:
            callback(line)

    def _why_not(self, model: nn.Module, called: nn.Module | None, optimizers: Sequence[Any]) -> str | None:
        root = unwrapped(model)
        if called is None and self._acts:
            return "it is never called as a module, so that nothing can be put around its calls"
        if called is not model and self._acts:
            return f"parts of it are called ({type(called).__name__}), and not the whole (plimsoll.prepare can do that)"
        if root in PREPARED:
            return "the script has prepared it itself"
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", device_of(root).type)):
            return "the script uses torch.autocast itself"
        if self._unseen is None or self._unseen.scaler is None:
            scalers = [x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler)]
            enabled = next((scaler for scaler in scalers if scaler.is_enabled()), None)
            if enabled is not None:
                return f"the script has a {type(enabled).__name__} itself"
        return None if self._level.operations is None else self._why_not_amp(root, optimizers)

    def _why_not_amp(self, root: nn.Module, optimizers: Sequence[Any]) -> str | None:
        strange = next((p.dtype for p in root.parameters() if p.is_floating_point() and p.dtype != torch.float32), None)
        if strange is not None:
            return f"it has weights in {strange}, where the level keeps all in torch.float32"
        if root.__dict__.get("_compiled_call_impl") is not None:
            return "its own method compile() has compiled it (torch.compile(model) can be wrapped)"
        if not self._level.scaled:
            return None
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
            return "LBFGS evaluates the loss within its step, where no step can be skipped"
        whole = "FullyShardedDataParallel"
        if is_fully_sharded(root) or any(
            is_sharded(p) or type(p).__name__ == "FlatParameter" for p in root.parameters()
        ):
            return f"its parameters are sharded ({whole} or tensor parallel): use amp-bf16, or plimsoll.prepare"
        return None

    # -- application ---------------------------------------------------------------------------------------------------

    def _put(self, model: nn.Module) -> None:
        root = unwrapped(model)
        if not self._undo:
            self._undo += [patched(torch.autocast, "__enter__", self._entering)]
            self._undo += [patched(torch.amp.GradScaler, "__init__", self._making)]
        layers = None
        if self._level.fp8 is not None:
            layers = Layers(root, self._level.fp8, Policy(), {})
            self._undo.append(layers.take_back)
        computing = Arithmetic(root, self._level, Policy(), {})
        if layers is not None and not computing.native:
            layers.keep_lists_out(root, computing.switch, outputs=torch.bfloat16)
        with computing.forward():  # a lack of this machine shows here, and not in the script's call
            pass
        if self._level.matmuls is not None and has_tf32(device_of(root)):
            self._undo.append(patched_backward(_in_tf32))
        if not self._acts:
            return
        seat = module_to_wrap(model)
        forward = Forward(seat, functools.partial(self._call, computing))
        self._undo += [forward.remove, seat.register_forward_hook(Widen()).remove]
        if self._unseen is not None:
            first = self._unseen.scaler is None
            self._unseen.begin(device_of(root))
            # Registered before the watch's own hook, since the watch's step ends with the scaler's update.
            begins = seat.register_forward_pre_hook(_Begins(self._unseen), prepend=True)
            self._undo += [begins.remove, *([patched_backward(self._unseen.backward)] if first else [])]

    def _call(self, computing: Arithmetic, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's forward under the level, and leave the level in any case."""
        if self._over or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        stack = contextlib.ExitStack()
        self._ours = True
        try:
            stack.enter_context(computing.forward())
        except PlimsollError as error:
            self._refuse(str(error))
        finally:
            self._ours = False
        self._open.append(stack)
        try:
            return forward(*args, **kwargs)
        finally:
            if stack in self._open:
                self._open.remove(stack)
            stack.close()

    def _entering(self, original: Callable[..., Any], context: Any, args: Any, kwargs: Any) -> Any:
        """Refuse the level when the script enters autocast itself."""
        # Torch's own contexts during a backward are ignored.
        if context._enabled and not self._ours and backward_running() == -1:  # noqa: SLF001
            self._refuse("the script uses torch.autocast itself, from here on")
        return original(context, *args, **kwargs)

    def _making(self, original: Callable[..., Any], scaler: Any, args: Any, kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled() and not type(scaler).__module__.endswith("precision.scripts.transparent_scaling"):
            self._refuse(f"the script makes a {type(scaler).__name__} itself")


def _in_tf32(original: Callable[..., None], tensors: Any, args: Any, kwargs: Any) -> None:
    with tf32():
        original(tensors, *args, **kwargs)


class _Begins(ModuleHook):
    """Hook at the start of a forward: a training forward ends the iteration before."""

    def __init__(self, unseen: TransparentScaler) -> None:
        self._unseen = unseen

    def __call__(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002  (torch's to choose)
        if torch.is_grad_enabled() and backward_running() == -1 and not torch.compiler.is_compiling():
            self._unseen.settle()
