"""The recorder of a step: a dispatch mode that notes what every operation read, wrote and computed in.

It computes nothing and changes nothing. Operations are seen below autograd and autocast, so that the casts of autocast
are operations like others. Wrappers of tensors (DTensor, quantized weights) are let through, and what they do inside is
recorded. Code of torch.compile is compiled as ever; `compiled_code` adds its operations.
"""

import contextlib
import os
from collections.abc import Generator
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.emulate import recipe
from plimsoll.formats import Format
from plimsoll.receipts.recording.entries import Entries
from plimsoll.receipts.recording.observation import Forward, Observation
from plimsoll.receipts.recording.values import Memory
from plimsoll.tracing.call_site import ForwardIndex
from plimsoll.tracing.operation_schema import bound, facts_of
from plimsoll.tracing.state_snapshot import Before

_C = cast("Any", torch)._C  # noqa: SLF001
_OPERATOR = cast("Any", torch)._ops.OpOverload  # noqa: SLF001
_SILENT = frozenset(("detach", "lift_fresh", "alias", "wait_tensor", "_wrap_tensor_autograd", "barrier"))
_PLAIN = ("torch._subclasses.functional_tensor",)


class Recorder(TorchDispatchMode):
    """Records the operations inside its context while `recording` is set."""

    supports_higher_order_operators = True

    def __init__(self, before: Before | None = None) -> None:
        super().__init__()
        self._before = before
        self.entries, self.memory = Entries(), Memory()
        self.forwards: ForwardIndex[Forward] = ForwardIndex()
        self.roots: dict[int, Any] = {}  # the outermost modules that ran
        self.recording = True
        self.muted = 0  # parts of an operation that is recorded as a whole
        self.stepping = 0  # optimizers that are in their step
        self.after_backward = False
        self.inside_compiled = 0
        self.fake = False  # the step itself runs on fake tensors
        self._process = os.getpid()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is compiled and run as without the mode."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Likewise, where torch has no `ignore_compile_internals` (2.9)."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __enter__(self) -> "Recorder":
        recipe.around_sums.append(self._around_sum)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        recipe.around_sums.remove(self._around_sum)

    def restart(self) -> None:
        """Forget the operations so far. What is known of memory and of autograd's graph stays."""
        self.entries.clear()
        self.memory.restart()

    def about_to_write(self, x: Tensor) -> None:
        """Keep memory that an operation is about to change, if it was there before the step."""
        held = self.memory.of(x)
        if self._before is not None and (held is None or held.role != "other"):
            self._before.about_to_write(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_elsewhere() or not isinstance(func, _OPERATOR):  # operators of higher order have no schema
            return func(*args, **kwargs)
        if FakeTensor in types:
            if not self.fake:  # DTensor asks for the shape of a result
                return func(*args, **kwargs)
            types = ()
        if any(map(_wraps, types)):
            return NotImplemented
        facts = facts_of(func)
        view = facts.view and not facts.cast  # `to` gives its argument, or a copy in another dtype
        if view or facts.base in _SILENT or facts.name.startswith(("profiler.", "prim.")):
            return func(*args, **kwargs)
        with _C.DisableTorchFunction():
            observation = Observation(self, facts, bound(facts, args, kwargs))
        result = func(*args, **kwargs)
        with _C.DisableTorchFunction():
            observation.end(result)
        return result

    def _is_elsewhere(self) -> bool:
        """Whether the call is none of the step's: it belongs to a compiler, to compiled code, or to another process."""
        if not self.recording or self.inside_compiled or self._process != os.getpid():
            return True
        return cast("Any", torch)._guards.TracingContext.try_get() is not None  # noqa: SLF001

    @contextlib.contextmanager
    def _around_sum(self, accumulator: Format, a: Tensor, b: Tensor) -> Generator[None]:
        """Record an emulated product with an accumulator of its own as one product."""
        facts = facts_of(torch.ops.aten.mm.default)
        whole = None if self._is_elsewhere() else Observation(self, facts, {"self": a, "mat2": b})
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1
        if whole is not None:
            whole.end_sum(accumulator.name)


def _wraps(kind: type) -> bool:
    """Return whether tensors of a class wrap others and handle operations themselves."""
    return kind not in (Tensor, torch.nn.Parameter) and not kind.__module__.startswith(_PLAIN)
