"""How a shadow step sees the forward of a root that is compiled together with its hooks.

`torch.compile` runs the root's own hooks outside of what it compiles, except where the root is a module of torch itself
(`nn.Sequential`): then they are traced, and nothing in Python hears of the call. So the call of the module that
`torch.compile` returns is wrapped, on its class, while a watch with shadow steps is open.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from plimsoll.watch.names import unwrapped

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def watch_calls(root: nn.Module, around: Around) -> Callable[[], None]:
    """Has `around` called, with the real call, for each call of a compiled module around the root; returns the undoing.

    `around` is a bound method, and is held weakly.
    """
    import torch._dynamo.eval_frame as dynamo  # (whoever has an optimizer has imported it already)

    kind = cast("Any", dynamo.OptimizedModule)
    original, listener, ours = kind.__call__, weakref.WeakMethod(cast("Any", around)), weakref.ref(root)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (told := listener()) is None or unwrapped(self) is not ours():
            return original(self, *args, **kwargs)
        return told(functools.partial(original, self), args, kwargs)

    kind.__call__ = call
    return lambda: _undo(kind, call, original)


def _undo(kind: Any, call: object, original: object) -> None:
    """Puts the original back, unless someone has wrapped ours since: then ours stays, and tells nobody."""
    if kind.__dict__.get("__call__") is call:
        kind.__call__ = original
