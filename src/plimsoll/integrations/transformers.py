"""Hugging Face's `Trainer`: ``Trainer(callbacks=[WatchCallback("runs/exp1")])``."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from plimsoll.diagnosis import Finding
from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.integrations.session import Session
from plimsoll.watch import Watch

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "plimsoll.integrations.transformers: expected the package transformers; got none. "
        f"Install it: {install_line('transformers')}"
    ) from error

_ARGUMENTS = (  # those of some hundred that trainings differ in
    "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "per_device_train_batch_size",
    "gradient_accumulation_steps", "num_train_epochs", "max_steps", "seed",
)  # fmt: skip


class WatchCallback(TrainerCallback):
    """Callback that records `transformers.Trainer` into `run`, and judges it.

    It records what the trainer logs too.

    - `guard`: keyword arguments of `plimsoll.Guard`, which then looks at the training while it goes on.
    - `verdict`: whether the run is judged by `plimsoll.diagnose` at the end; alarms are warned of.
    - `settings`: whatever else `plimsoll.watch` takes, as ``every=10`` or ``collect=("weights", "gradients")``.

    A training that goes on from a checkpoint goes on in the same run, and replaces what that has of later steps.
    The run's settings have the `TrainingArguments` that trainings differ in.
    Numbers that are logged keep their names, `epoch` among them. ``loss``, which is the mean since the last one logged,
    is recorded as ``logged_loss``, since the watch has the loss of every step itself.
    """

    def __init__(
        self,
        run: "str | os.PathLike[str]",
        *,
        guard: Mapping[str, Any] | None = None,
        verdict: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._session = Session("WatchCallback", run, settings, guard, verdict=verdict)

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self._session.path

    @property
    def watch(self) -> Watch | None:
        """The watch, while a training goes on."""
        return self._session.watch

    @property
    def findings(self) -> list[Finding]:
        """Findings at the end of the last training, in the first process."""
        return self._session.findings

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        """Start to watch."""
        del control, others
        assert model is not None  # the trainer hands it over
        facts = {"arguments": {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}}
        self._session.begin(model, [] if optimizer is None else [optimizer], None, state.global_step, facts)

    def on_log(
        self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        """Record what is logged."""
        del args, state, control, others
        self._session.log(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """End the watch, and judges the run."""
        del args, control, others
        self._session.end(judges=state.is_world_process_zero)
