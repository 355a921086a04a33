"""Models that are trained in evaluation mode, and batch norms that have seen no data."""

from collections.abc import Iterable
from typing import cast

from torch import nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Event, Record
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession

_STEPS = 10  # on end: a script may evaluate right before a step
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EvaluationMode:
    """Mode of one model and its modules, at the steps of its optimizers."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
        self._evaluated = 0  # steps on end with the model in evaluation mode
        self._was_training = False  # before that
        self._said = False

    # Batch norms that are frozen on purpose keep the statistics of the data that went before. Those that were never in
    # training mode have a mean of 0 and a variance of 1: they normalise nothing.
    def step_begins(self, steps: int) -> None:
        """An optimizer's step begins, after so many of it; the tenth on end is recorded."""
        model = self.core.model()
        if model is None or self._said:
            return
        self._was_training |= model.training
        self._evaluated = 0 if model.training else self._evaluated + 1
        if _STEPS not in (self._evaluated, steps):
            return
        modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        off = [(clean(name), module) for name, module in modules if not module.training]
        dropouts = [name for name, m in off if isinstance(m, _DROPOUTS) and m.p > 0]
        norms = {
            name: DeviceValue(((m.running_mean == 0).all() & (m.running_var == 1).all()).reshape(1))
            for name, m in off
            if isinstance(m, _NORMS) and m.running_mean is not None and m.running_var is not None
        }
        if norms or (dropouts and not model.training):
            self._said = self._evaluated >= _STEPS or model.training
            self._hand_over(norms, dropouts, whole=not model.training)

    def _hand_over(self, norms: dict[str, DeviceValue], dropouts: list[str], *, whole: bool) -> None:
        step, later = self.core.step, self._was_training

        def produce() -> list[Record]:
            initial = [name for name, value in norms.items() if bool(value.tensor()[0])]
            message = "the model is trained in evaluation mode" if whole else "batch norms are in evaluation mode"
            details = {
                "fact": "evaluation mode", "whole": whole, "later": later, "dropouts": dropouts, "norms": list(norms),
                "initial": initial,
            }  # fmt: skip
            return [Event(step=step, kind="wiring", message=message, details=details)]

        self.core.writer.submit(produce, 400)
