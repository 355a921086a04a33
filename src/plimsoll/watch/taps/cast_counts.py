"""Record of modules' casts to 8 bits before they multiply: formats and scales."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from plimsoll.formats import ROLES, Role, get_element
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Record, Scalars
from plimsoll.runs.reading.module_casts import EVENT, scalar_of
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession, contained

_ROW_BYTES = 100  # of one scale that waits to be written


@runtime_checkable
class Casting(Protocol):
    """A module that casts what it multiplies."""

    def casts(self) -> Mapping[str, tuple[str, float | Tensor]]:
        """Return each role's format and the scale before the cast.

        The roles are "activations", "weights" and "gradients".

        The scale multiplies: a number where it is constant, a 0-d tensor where it follows the data.
        """
        ...


class Casts:
    """Recorder of the casts of one watch's model."""

    def __init__(self, session: WatchSession, takes: Callable[[str], bool]) -> None:
        self.session, self._takes = session, takes
        # A run that goes on may say of other casts than there are now.
        self._told: dict[str, dict[Role, dict[str, Any]]] | None = {} if session.step == 0 else None

    # A module casts if it has a method `casts`; that of `plimsoll.fp8` is one, a user's own may be another. It is asked
    # at the end of each step that is sampled, after the backward, when all scales of the step are known and before a
    # loop can put other modules in place. What is constant is recorded once, in an event; scales that follow the data
    # are scalars of the step, read on the background thread, which alone waits for the device.
    @contained
    def tell(self) -> None:
        """Record the casts at the step's end, if not known, and the scales that changed."""
        model = self.session.model()
        if self.session.sample is None or model is None:
            return
        table: dict[str, dict[Role, dict[str, Any]]] = {}
        scales: dict[str, Tensor] = {}
        for name, module, said in self._found(model):
            weight = next((p for key, p in module.named_parameters(recurse=False) if key == "weight"), None)
            series = self._series(name, model, weight)
            for role in ROLES:
                if role in said:
                    fmt, scale = said[role]
                    table.setdefault(name, {})[role] = {
                        "format": get_element(fmt, "casts").name,
                        "scale": None if isinstance(scale, Tensor) else float(scale),
                        "series": series[role],
                    }
                    if isinstance(scale, Tensor):
                        scales[scalar_of(name, role)] = scale
        self._tell_table(table)
        self._tell_scales(scales)

    def _found(self, model: nn.Module) -> Iterable[tuple[str, nn.Module, Mapping[str, tuple[str, float | Tensor]]]]:
        for full, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
            if callable(getattr(type(module), "casts", None)):  # asked first: at the end of each step, of all modules
                name = clean(full) or self.session.name
                if self._takes(name):
                    yield name, module, cast("Casting", module).casts()

    def _series(self, name: str, model: nn.Module, weight: nn.Parameter | None) -> dict[Role, str]:
        """Return each role's series; a shared weight is recorded by its first name."""
        owner = "" if name == self.session.name else f"{name}."
        named = f"{owner}weight"
        if weight is not None:
            named = next((clean(key) for key, p in model.named_parameters() if p is weight), named)
        return {"weights": named, "activations": f"{name}:input", "gradients": f"{name}:output"}

    def _tell_table(self, table: dict[str, dict[Role, dict[str, Any]]]) -> None:
        if table == self._told:
            return
        self._told = table
        formats = sorted({cast_of_role["format"] for said in table.values() for cast_of_role in said.values()})
        message = (
            f"{len(table)} modules cast what they multiply to {', '.join(formats)}" if table else "no module casts"
        )
        self.session.say(EVENT, message, modules=table)
        self.session.writer.write_manifest(casts=table)

    def _tell_scales(self, scales: Mapping[str, Tensor]) -> None:
        step, by_device = self.session.step, dict[torch.device, list[str]]()
        for name, scale in scales.items():
            by_device.setdefault(scale.device, []).append(name)
        for names in by_device.values():
            values = DeviceValue(torch.stack([scales[name].detach().double().reshape(()) for name in names]))

            def produce(names: list[str] = names, values: DeviceValue = values) -> list[Record]:
                numbers = cast("list[float]", values.tensor().tolist())
                return [Scalars(step=step, values=dict(zip(names, numbers, strict=True)))]

            self.session.writer.submit(produce, _ROW_BYTES * len(names))
