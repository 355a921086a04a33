"""Lightning: `WatchCallback` records a training, `PrecisionPlugin` sets levels."""

import contextlib
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.diagnosis import Finding
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.formats import ModulePlan
from plimsoll.integrations.session import Session
from plimsoll.precision.levels.arithmetic import Arithmetic, device_of
from plimsoll.precision.levels.catalogue import level_named
from plimsoll.precision.levels.policy import Policy
from plimsoll.scaling import DynamicScaler
from plimsoll.watch import Watch
from plimsoll.watch.names import unwrapped

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins import MixedPrecision
except ImportError as error:
    raise MissingExtraError(
        "plimsoll.integrations.lightning: expected the package lightning; got none. "
        f"Install it: {install_line('lightning')}"
    ) from error

_LEVELS = ("fp32", "tf32", "amp-fp16", "amp-bf16")  # those that leave weights and optimizers as they are
_LIGHTNINGS = {"fp16": "16-mixed", "bf16": "bf16-mixed", None: "32-true"}


class WatchCallback(Callback):
    """Callback that records what `Trainer.fit` trains into `run`, and judges it.

    It records what the module logs too.

    - `run`: None for ``plimsoll`` in the trainer's own log folder.
    - `guard`: keyword arguments of `plimsoll.Guard`, which then looks at the training while it goes on.
    - `verdict`: whether the run is judged by `plimsoll.diagnose` at the end; alarms are warned of.
    - `settings`: whatever else `plimsoll.watch` takes, as ``every=10`` or ``collect=("weights", "gradients")``.

    A training that goes on from a checkpoint goes on in the same run, and replaces what that has of later steps.
    The run's settings have the module's `hparams`. `epoch` is recorded with the first batch of each, and with what is
    logged.
    Numbers that are logged keep their names; ``loss`` is recorded as ``logged_loss``, since the watch has the loss of
    every step itself. An exception that ends the training is recorded with the steps before it.
    """

    def __init__(
        self,
        run: "str | os.PathLike[str] | None" = None,
        *,
        guard: Mapping[str, Any] | None = None,
        verdict: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._session = Session("WatchCallback", run or "plimsoll", settings, guard, verdict=verdict)
        self._in_log_folder = run is None

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

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to watch."""
        if self._in_log_folder:
            self._session.path = Path(trainer.log_dir or trainer.default_root_dir) / "plimsoll"
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        hparams = cast("Mapping[str, object]", pl_module.hparams)
        facts = {"hparams": dict(hparams)} if hparams else {}
        self._session.begin(trainer.model or pl_module, trainer.optimizers, scaler, trainer.global_step, facts)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record logged values as often as the loggers do, and epochs at first batches."""
        del pl_module, outputs, batch
        interval: int = cast("Any", trainer).log_every_n_steps
        logs = interval and trainer.global_step % interval == 0
        if logs or batch_idx == 0:
            epoch = trainer.current_epoch + batch_idx / trainer.num_training_batches  # which may be infinite
            self._session.log({"epoch": epoch, **(trainer.logged_metrics if logs else {})})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what validation logged."""
        del pl_module
        self._session.log(trainer.logged_metrics)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the watch, and judges the run."""
        del pl_module
        self._session.end(judges=trainer.is_global_zero)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the watch, with the error on record."""
        del trainer, pl_module
        self._session.end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the watch where nothing else has."""
        del trainer, pl_module, stage
        self._session.end()


class PrecisionPlugin(MixedPrecision):
    """Plugin that trains at a level: ``Trainer(plugins=[PrecisionPlugin(...)])``.

    - `precision`: fp32, tf32, amp-fp16 or amp-bf16. Levels that cast weights need another loop: `plimsoll.prepare`.
    - `scaler`: for amp-fp16, any of `plimsoll.scaling`; by default a `DynamicScaler`. Its state is in the checkpoints.
    - `policy`: the operation lists, and formats of single modules.

    On a CPU FP16 and BF16 are computed as a GPU does: by the lists of CUDA's autocast, products accumulated in FP32.

    Raises `ArgumentError` for another level, and for a scaler where nothing is scaled.
    """

    def __init__(self, precision: str = "amp-fp16", *, scaler: Any = None, policy: Policy | None = None) -> None:
        level = level_named(precision)
        if level.name not in _LEVELS:
            raise ArgumentError(
                f"PrecisionPlugin: expected a level that leaves weights and optimizers as they are, "
                f"{', '.join(_LEVELS)}; got {precision!r}. For others write the loop with plimsoll.prepare."
            )
        if scaler is not None and not level.scaled:
            raise ArgumentError(
                f"PrecisionPlugin: expected no scaler at {level.name}, where the loss is not scaled; got "
                f"{type(scaler).__name__}. Leave it out."
            )
        # Lightning's own constructor knows its own levels and torch's scaler alone.
        self.precision = cast("Any", _LIGHTNINGS[level.operations])
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.scaler = cast("Any", DynamicScaler(self.device) if level.scaled and scaler is None else scaler)
        self._level, self._policy = level, policy or Policy()
        self._computing: Arithmetic | None = None

    def connect(self, model: nn.Module, optimizers: Any, lr_schedulers: Any) -> Any:
        """Learn what will be trained."""
        self._leave()
        self.device = device_of(model).type
        root = unwrapped(model)
        rules = {name: ModulePlan.of(fmt) for name, fmt in self._policy.formats_of(root).items()}
        self._computing = Arithmetic(root, self._level, self._policy, rules)
        return super().connect(model, optimizers, lr_schedulers)

    def teardown(self) -> None:
        """Take everything back from the model."""
        self._leave()
        super().teardown()

    @contextlib.contextmanager
    def forward_context(self) -> Generator[None]:
        """Context manager in which a forward runs."""
        with contextlib.nullcontext() if self._computing is None else self._computing.forward():
            yield

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """The backward, at the level's matrix products."""
        with contextlib.nullcontext() if self._computing is None else self._computing.backward():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def _leave(self) -> None:
        if self._computing is not None:
            self._computing.remove()
            self._computing = None
