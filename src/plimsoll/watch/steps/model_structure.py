"""Changes of a watched model: modules and parameters replaced, added or removed.

LoRA merges, pruning, layers that are added or unfrozen put other objects in the place of those that the watch knows.
Sampled steps look for that, by identity, before their forward and before an optimizer steps: tens of microseconds for a
transformer. What is new is recorded from there on.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from plimsoll.watch.names import Selection, clean, module_names
from plimsoll.watch.parameters.optimizer_tensors import Parameters
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.taps.module_taps import Taps

_MOST_EVENTS = 16  # a search for architectures changes its model all the time
_FEW = 3  # names in a message
_NAMED = 20  # and in its details

_Known = Callable[[], object]


class Structure:
    """The modules and parameters of one watch's model."""

    def __init__(
        self, session: WatchSession, parameters: Parameters, selection: Selection, taps: Taps, *, tapped: bool
    ) -> None:
        self.session = session
        self._parameters, self._selection, self._taps, self._tapped = parameters, selection, taps, tapped
        self._events = 0
        self._learn()

    def _learn(self) -> None:
        model = self.session.model()
        modules: list[Any] = list(model.modules()) if model is not None else []
        self._parts: list[tuple[weakref.ref[Any], tuple[_Known, ...], tuple[_Known, ...]]] = [
            (weakref.ref(m), _known(m._parameters.values()), _known(m._modules.values()))  # noqa: SLF001
            for m in modules
        ]
        named = model.named_parameters() if model is not None else ()
        self._names = {clean(name): weakref.ref(p) for name, p in named}
        self._modules = {name: weakref.ref(m) for name, m in module_names(model).items()} if model is not None else {}

    @contained
    def follow(self) -> None:
        """Look in a sampled step for changes of the model, and record it as it is."""
        model = self.session.model()
        if self.session.sample is None or model is None or self.session.ranks.wrapper == "fully_shard":
            return
        if not self._is_changed():
            return
        weights, modules = self._names, self._modules
        self._learn()
        named = module_names(model)
        self._selection.meet(named, self._names)
        self._parameters.meet_model()
        if self._tapped:
            self._taps.follow({name: module for name, module in named.items() if self._selection.takes(name)})
        self._say(_changes(weights, self._names), _changes(modules, self._modules))

    # Not looked at: tensors that are no parameters, which `torch.func.functional_call` puts in a parameter's place for
    # the time of a call, and models under `fully_shard`, which swaps its parameters all the time.
    def _is_changed(self) -> bool:
        for ref, params, children in self._parts:
            module = ref()
            if module is None:
                return True
            parameters, inside = module._parameters, module._modules  # noqa: SLF001  (a walk by name costs tenfold)
            if len(parameters) != len(params) or len(inside) != len(children):
                return True
            for p, known in zip(parameters.values(), params, strict=True):
                if p is not known() and (p is None or isinstance(p, nn.Parameter)):
                    return True
            for child, known in zip(inside.values(), children, strict=True):
                if child is not known():
                    return True
        return False

    def _say(self, parameters: dict[str, list[str]], modules: dict[str, list[str]]) -> None:
        new_names = {
            f"{what} {how}": names
            for what, changes in (("parameters", parameters), ("modules", modules))
            for how, names in changes.items()
            if names
        }
        self._events += 1
        if not new_names or self._events > _MOST_EVENTS:
            return
        words = "; ".join(f"{len(names)} {what} ({_listed(names)})" for what, names in new_names.items())
        details: dict[str, Any] = {what: names[:_NAMED] for what, names in new_names.items()}
        self.session.say("model changed", f"the model has changed, and is recorded as it is now: {words}", **details)


def _known(values: Iterable[object]) -> tuple[_Known, ...]:
    return tuple(_nothing if value is None else weakref.ref(value) for value in values)


def _nothing() -> None:
    """Stands for a reference to None."""


def _changes(before: Mapping[str, _Known], now: Mapping[str, _Known]) -> dict[str, list[str]]:
    return {
        "added": [name for name in now if name not in before],
        "replaced": [name for name in now if name in before and before[name]() is not now[name]()],
        "removed": [name for name in before if name not in now],
    }


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")
