"""Taps inside compiled code and CUDA graphs, which Python runs once.

While `torch.compile` traces a model its hooks are traced too. A tensor gets a *site* then: one row for its values and
one for its gradient, fixed for the life of that graph, in banks whose addresses never change. The graph counts into
these rows whenever it runs; at the step's end they are read and emptied. What runs twice in a step adds up, and a
recomputed forward does not: the compiler drops the second count, since nothing in the backward needs it. Values and
gradients are in separate banks, or forward and backward graphs would each wait for the other's.
"""

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from plimsoll import kernels, row_layout
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.kernels.operators.definitions import without_autograd
from plimsoll.watch.names import tensors_among, tensors_in
from plimsoll.watch.sample import Rows
from plimsoll.watch.session import WatchSession

_ROUNDING = (
    "compiled code in 16 bits rounds at other places when it is watched: a tap ends a fusion. For the same bits with "
    "and without, set torch._inductor.config.emulate_precision_casts = True in both"
)
_known: "weakref.WeakValueDictionary[int, CompiledTaps]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_BUILT = torch.backends.cuda.is_built()


def inlined_only(*hooks: Callable[..., Any]) -> None:
    """Let the compiler trace these functions only inside other traced code."""
    # The compiler runs the outermost module's hooks outside its graph, as frames of their own: these stay plain Python.
    frames: Any = getattr(cast("Any", torch)._C._dynamo, "eval_frame", None)  # noqa: SLF001  (nowhere in public)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP  # noqa: SLF001
        for hook in hooks:
            frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))  # noqa: SLF001


def is_capturing() -> bool:
    """Return True if a CUDA graph is being captured on the current stream."""
    return _BUILT and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class _Sites:
    """The sites of one device: two banks at fixed addresses, and the rows' owners."""

    def __init__(self, device: torch.device, capacity: int, block: int) -> None:
        self.values, self.gradients = _fixed(device, capacity, block), _fixed(device, capacity, block)
        self.names: list[list[str]] = []  # of the tensor, for each site
        self.dtypes: list[torch.dtype] = []
        self.tapped: list[bool] = []  # whether the gradient is counted too
        self.capacity = capacity

    def move_into(self, rows: Rows, session: WatchSession) -> None:
        """Hands what was counted to the sample, and empties the rows."""
        used = len(self.names)
        for bank, collection in ((self.values, "activations"), (self.gradients, "activation_gradients")):
            if not getattr(session.due, collection):
                continue
            first = rows.adopt(bank[:used])
            scaled = collection == "activation_gradients"
            factor = float(session.ranks.data_parallel * session.ranks.microbatches) if scaled else 1.0
            for site, (names, dtype) in enumerate(zip(self.names, self.dtypes, strict=True)):
                for name in names if self.tapped[site] or not scaled else ():
                    series = session.series_of(collection, name, bank, dtype)
                    rows.enter(first + site, series, scaled=scaled, factor=factor, unless_empty=True)
        self.empty()

    def empty(self) -> None:
        """Forgets what was counted."""
        self.values[: len(self.names)].zero_()
        self.gradients[: len(self.names)].zero_()


class CompiledTaps:
    """The sites of one watch."""

    def __init__(self, session: WatchSession, devices: set[torch.device], taps: int) -> None:
        self.session, self.block = session, session.settings.block
        self.number = next(_numbers)
        self.traced: Any = WeakTensorKeyDictionary()  # a traced tensor's site, and the version that was counted there
        # A graph has two sites a tap at most; capacity for several graphs (shapes, dtypes) over a run's life.
        self.sites = {str(device): _Sites(device, 8 * taps + 256, self.block) for device in devices}
        self.captured = False  # there are taps in a CUDA graph
        self.keeps = session.settings.shadow_every is not None
        _known[self.number] = self

    @property
    def in_use(self) -> bool:
        """True if code was compiled, or a CUDA graph captured, with taps in it."""
        return self.captured or any(sites.names for sites in self.sites.values())

    def seal(self) -> None:
        """Hands what was counted in this step to its sample."""
        for device, sites in self.sites.items():
            if sites.names:
                if self.session.sample is None:
                    sites.empty()
                else:
                    sites.move_into(self.session.sample.rows(torch.device(device)), self.session)

    def inputs(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Counts a module's inputs; traced by the compiler."""
        if torch.is_grad_enabled() and not _passes(self.number):
            for path, x in tensors_among(args, kwargs):
                if not self._also(f"{name}:input{path}", x, tapped=False):
                    self._remember(x, self._count(f"{name}:input{path}", x, tapped=False))

    def outputs(self, name: str, output: Any) -> Any:
        """Count a module's outputs; return them with gradients tapped, or None; traced."""
        if not torch.is_grad_enabled() or _passes(self.number):
            return None
        tapped = [self._tapped(f"{name}:output{path}", x) for path, x in tensors_in(output)]
        if isinstance(output, Tensor):
            return tapped[0] if tapped else None
        if type(output) is tuple or type(output) is list:
            places: list[Any] = list(cast("list[Any]", output))
            own = [i for i, x in enumerate(places) if isinstance(x, Tensor) and x.is_floating_point()]
            if len(own) == len(tapped):  # else some are deeper, and keep their gradients to themselves
                for i, x in zip(own, tapped, strict=True):
                    places[i] = x
                return tuple(places) if isinstance(output, tuple) else places
        return None

    # A module's output is replaced by its clone (which the compiler removes again), from an autograd function that
    # measures the gradient. That the clone has its site already is remembered of the tensor that stands for it while
    # the compiler traces, and of its version: one that is changed in place since is measured again. The gradient of an
    # input that no module gave out cannot be read whole in compiled code, and is not recorded.
    def _tapped(self, name: str, x: Tensor) -> Tensor:
        tapped = self.session.due.activation_gradients and x.requires_grad
        if self._also(name, x, tapped=tapped):
            return x
        site = self._count(name, x, tapped=tapped)
        if site < 0:
            return x
        gradients = self.sites[str(x.device)].gradients
        number = self.number if self.keeps else -1
        y = cast("Tensor", _TapGradient.apply(x, gradients, site, self.block, number)) if tapped else x.clone()
        self._remember(y, site)
        return y

    def _remember(self, x: Tensor, site: int) -> None:
        _look_at(x)
        _remember(self.number, site)

    def _also(self, name: str, x: Tensor, *, tapped: bool) -> bool:
        """Return True if the tensor has a site, which is now listed under this name too."""
        _look_at(x)
        return _also(self.number, name, str(x.device), tapped)

    def _count(self, name: str, x: Tensor, *, tapped: bool) -> int:
        site = _new_site(self.number, name, str(x.device), x.dtype, tapped)
        if site >= 0 and self.session.due.activations:
            kernels.measure_into([x.detach()], self.sites[str(x.device)].values, [site], block=self.block)
        if site >= 0 and self.keeps:
            torch.ops.plimsoll.keep_(x.detach(), self.sites[str(x.device)].values, self.number, site, False)
        return site

    # Which collections are due is a guard: a graph for sampled steps and one for the others, which holds no trace of a
    # tap. Where shadow steps are asked for, the graph of sampled steps also hands each tensor to `keep_`, which copies
    # it if the step has one.
    def keep(self, x: Tensor, site: int, *, gradient: bool) -> None:
        """Hands a tensor to the shadow step; called by compiled code as it runs."""
        shadow = self.session.shadow
        if shadow is not None and shadow.due and not is_capturing():
            device = str(x.device)
            shadow.see_compiled((device, site), self.sites[device].names[site], x, gradient=gradient)

    def capture(self, name: str, x: Tensor) -> None:
        """Counts a tensor while a CUDA graph is captured."""
        self.captured = True
        tapped = self.session.due.activation_gradients and x.requires_grad
        site = new_site(self, name, str(x.device), x.dtype, tapped)
        sites = self.sites.get(str(x.device))
        if sites is None or site < 0:
            return
        if self.session.due.activations:
            kernels.measure_into([x.detach()], sites.values, [site], block=self.block)
        if tapped:
            rows, block = sites.gradients, self.block

            def count(g: Tensor) -> None:
                kernels.measure_into([g.detach()], rows, [site], block=block)

            x.register_hook(count)


def new_site(taps: CompiledTaps, name: str, device: str, dtype: torch.dtype, tapped: bool) -> int:
    """A site for a tensor; -1 where there is no room."""
    sites = taps.sites.get(device)
    if sites is None or len(sites.names) == sites.capacity:
        taps.session.say("capped", f"no room to record {name} of a compiled graph on {device}", once="sites", warn=True)
        return -1
    if dtype in SIXTEEN_BIT and not _keeps_casts():
        taps.session.say("rounding", _ROUNDING, once="rounding", warn=True)
    sites.names.append([name])
    sites.dtypes.append(dtype)
    sites.tapped.append(tapped)
    return len(sites.names) - 1


def _keeps_casts() -> bool:
    config: Any = sys.modules.get("torch._inductor.config")
    return config is None or bool(getattr(config, "emulate_precision_casts", True))


# The compiler enters a transform that it traces. Measuring there would end the training: the operators that count have
# no rule for batches, nor for the derivatives of a transform.
@torch.compiler.assume_constant_result
def _passes(taps: int) -> bool:
    """Return whether what is traced is inside a `torch.func` transform, and say that it is not measured."""
    if not is_transformed():
        return False
    _known[taps].session.say_transformed()
    return True


@torch.compiler.assume_constant_result
def _new_site(taps: int, name: str, device: str, dtype: torch.dtype, tapped: bool) -> int:
    return new_site(_known[taps], name, device, dtype, tapped)


# What the compiler evaluates while it traces cannot be given a traced tensor. So one function, which is run with the
# compiler's own view of its caller, notes the tensor that stands for it, and the next takes it from here.
_looked_at: list[Tensor] = []


def _look_at(x: Tensor) -> None:  # noqa: ARG001  (read by name)
    """Note the tensor that the compiler traces as `x`; does nothing when not traced."""
    from torch._dynamo.comptime import comptime

    comptime(_note)


def _note(caller: Any) -> None:
    _looked_at[:] = [caller.get_local("x").as_fake()]


@torch.compiler.assume_constant_result
def _also(taps: int, name: str, device: str, tapped: bool) -> bool:
    known, (x, version) = _known[taps], _take_noted()
    site, counted = (-1, -1) if x is None else known.traced.get(x, (-1, -1))
    if site < 0 or counted != version or (tapped and not known.sites[device].tapped[site]):
        return False
    names = known.sites[device].names[site]
    if name not in names:
        names.append(name)
    return True


@torch.compiler.assume_constant_result
def _remember(taps: int, site: int) -> None:
    x, version = _take_noted()
    if x is not None:
        _known[taps].traced[x] = site, version


def _take_noted() -> tuple[Tensor | None, int]:
    """Return the last noted tensor and its version; None where nothing is traced."""
    x = _looked_at.pop() if _looked_at else None
    return x, 0 if x is None or x.is_inference() else x._version  # noqa: SLF001  (public in all but name)


class _TapGradient(torch.autograd.Function):
    """Its input, whose gradient is counted on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, site: int, block: int, keeper: int) -> Tensor:
        ctx.rows, ctx.site, ctx.block, ctx.keeper = rows, site, block, keeper
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kernels.measure_into([grads[0]], ctx.rows, [ctx.site], block=ctx.block)
        if ctx.keeper >= 0:
            torch.ops.plimsoll.keep_(grads[0], ctx.rows, ctx.keeper, ctx.site, True)
        return grads[0], None, None, None, None


# The bank is named as what the operator writes into, so that no compiler takes the call for useless.
_library = torch.library.Library("plimsoll", "FRAGMENT")
_library.define("keep_(Tensor x, Tensor(a!) bank, int taps, int site, bool gradient) -> ()")


def _keep(x: Tensor, bank: Tensor, taps: int, site: int, gradient: bool) -> None:  # noqa: ARG001
    known = _known.get(taps)
    if known is not None:
        known.keep(x, site, gradient=gradient)


def _fake_keep(*_: object) -> None:
    return None


without_autograd(_library, "keep_", _keep)
torch.library.register_fake("plimsoll::keep_", _fake_keep, lib=_library)


def _fixed(device: torch.device, rows: int, block: int) -> Tensor:
    if device.type == "cpu":  # memory that is not touched is not used
        return torch.from_numpy(np.zeros((rows, row_layout.width(block)), np.int64))
    bank = kernels.new_bank(rows, block, device)
    if device.type == "cuda":  # lets the CUDA graphs of compiled code write into it
        cast("Any", torch)._dynamo.mark_static_address(bank)  # noqa: SLF001
    return bank
