"""Lightning's trainer, the real one: watched, guarded, resumed, and at Plimsoll's levels."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import plimsoll as pl
from plimsoll.integrations.lightning import PrecisionPlugin, WatchCallback
from plimsoll.scaling import DynamicScaler, SpectralScaler


class Task(lightning.LightningModule):
    def __init__(self, breaks_at: int | None = None, fails_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU())
        self.head = nn.Linear(16, 3)
        self.breaks_at, self.fails_at = breaks_at, fails_at
        self.dtypes: list[torch.dtype] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.fails_at:
            raise RuntimeError("the disk of the data is gone")
        hidden = self.body(batch[0])
        self.dtypes.append(hidden.dtype)
        loss = nn.functional.cross_entropy(self.head(hidden), batch[1])
        if self.global_step == self.breaks_at:
            loss = loss * torch.inf
        self.log("loss", loss)
        self.log("share", index / 10)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    torch.manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(3, (32,))), batch_size=4)


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., lightning.Trainer]:
    def fit(task: Task, *callbacks: Any, checkpoint: str | None = None, validate: bool = False, **settings: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning.*")
            warnings.filterwarnings("always", message="plimsoll:")
            warnings.filterwarnings("ignore", message="plimsoll: stop for")  # what a guard says of it
            trainer = lightning.Trainer(
                accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, callbacks=list(callbacks), default_root_dir=tmp_path, log_every_n_steps=2,
                **{"max_epochs": 1, **settings},
            )  # fmt: skip
            trainer.fit(task, data(), data() if validate else None, ckpt_path=checkpoint, weights_only=False)
        return trainer

    return fit


def test_a_training_is_recorded_step_by_step(fit: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback(tmp_path / "run", every=2)
    fit(Task(), callback, validate=True)
    run = pl.Run(tmp_path / "run")
    assert run.closed and list(run.steps) == [0, 2, 4, 6]
    assert {"body.0.weight", "head.bias"} <= set(run.tensors["weights"])
    assert "body.1:output" in run.tensors["activations"] and "head:output" in run.tensors["activation_gradients"]
    assert len(run.scalars("loss")[0]) == 8 and callback.findings == [] and callback.watch is None
    steps, values = run.scalars("logged_loss")
    assert len(steps) == 4 and all(values > 0)
    assert {"share", "val_loss"} <= set(run.scalar_names)
    steps, values = run.scalars("epoch")
    assert steps.tolist() == [0, 1, 3, 5, 7] and values.tolist() == [step / 8 for step in steps]
    assert run.settings["optimizer"]["name"] == "AdamW" and run.settings["optimizer"]["lr"] == 1e-2
    assert run.settings["hparams"] == {"breaks_at": None, "fails_at": None}


def test_watching_changes_no_bit(fit: Callable[..., Any], tmp_path: Path) -> None:
    watched, alone = Task(), Task()
    fit(watched, WatchCallback(tmp_path / "run", every=1))
    fit(alone)
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def test_the_run_lies_in_the_log_folder_by_default(fit: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback()
    fit(Task(), callback)
    assert callback.run == tmp_path / "plimsoll" and pl.Run(callback.run).closed


def test_an_exception_is_on_record(fit: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback(tmp_path / "run")
    with pytest.raises(RuntimeError, match="the disk of the data is gone"):
        fit(Task(fails_at=5), callback)
    events = [event for event in pl.Run(tmp_path / "run").events() if event.kind == "trigger"]
    assert len(events) == 1 and "the disk of the data is gone" in str(events[0]) and callback.watch is None


def test_an_alarm_is_warned_of_at_the_end(fit: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback(tmp_path / "run", every=1)
    with pytest.warns(RuntimeWarning, match="plimsoll check"):
        fit(Task(breaks_at=4), callback)
    assert any(finding.severity == "alarm" for finding in callback.findings)


def test_a_verdict_can_be_left_out(fit: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback(tmp_path / "run", every=1, verdict=False)
    fit(Task(breaks_at=4), callback)
    assert callback.findings == []


def test_a_training_resumed_goes_on_in_its_run(fit: Callable[..., Any], tmp_path: Path) -> None:
    first = fit(Task(), WatchCallback(tmp_path / "run", every=1), max_epochs=-1, max_steps=5)
    first.save_checkpoint(tmp_path / "at5.ckpt")
    settings: dict[str, Any] = {"checkpoint": str(tmp_path / "at5.ckpt"), "max_epochs": 2}
    second = fit(Task(), WatchCallback(tmp_path / "run", every=1), **settings)
    assert second.global_step > 5 and list(pl.Run(tmp_path / "run").steps) == list(range(second.global_step))
    fit(
        Task(), WatchCallback(tmp_path / "run", every=1), **settings
    )  # once more from step 5 replaces the first attempt
    assert list(pl.Run(tmp_path / "run").steps) == list(range(second.global_step))


def test_a_guard_stops_a_training(fit: Callable[..., Any], tmp_path: Path) -> None:
    guard = {"actions": ("stop",), "dry_run": False, "every": 2, "cpu_share": 1.0, "severity": "alarm"}
    callback = WatchCallback(tmp_path / "run", every=1, guard=guard)
    with pytest.raises(pl.GuardStop):
        fit(Task(breaks_at=2), callback, max_epochs=200)
    assert any(event.kind == "guard" for event in pl.Run(tmp_path / "run").events())


def test_settings_that_the_trainer_knows_are_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="WatchCallback: expected settings .* got model, start_step"):
        WatchCallback("run", model=nn.Linear(1, 1), start_step=3)


@pytest.mark.parametrize(
    ("level", "inside"),
    [
        ("fp32", torch.float32),
        ("tf32", torch.float32),
        ("amp-fp16", torch.float16),
        ("O1", torch.float16),
        ("amp-bf16", torch.bfloat16),
    ],
)
def test_a_level_holds_in_the_forward(fit: Callable[..., Any], level: str, inside: torch.dtype) -> None:
    task = Task()
    trainer = fit(task, plugins=[PrecisionPlugin(level)])
    assert set(task.dtypes) == {inside}
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in task.parameters())
    assert (trainer.precision_plugin.scaler is not None) is (inside == torch.float16)


def test_the_level_equals_prepare(fit: Callable[..., Any]) -> None:
    """The same training in a hand-written loop."""
    task, alone = Task(), Task()
    fit(task, plugins=[PrecisionPlugin("amp-fp16")], gradient_clip_val=0.1)
    optimizer = alone.configure_optimizers()
    with pl.prepare(alone, optimizer, "amp-fp16", clip_norm=0.1) as loop:
        for x, y in data():
            with loop.forward():
                loss = nn.functional.cross_entropy(alone.head(alone.body(x)), y)
            loop.step(loss)
    assert all(torch.equal(a, b) for a, b in zip(task.parameters(), alone.parameters(), strict=True))


def test_a_policy_holds_for_single_modules(fit: Callable[..., Any]) -> None:
    task = Task()
    fit(task, plugins=[PrecisionPlugin("amp-bf16", policy=pl.Policy().with_module("body", "fp32"))])
    assert set(task.dtypes) == {torch.float32}


def test_an_overflow_is_skipped_and_recorded(fit: Callable[..., Any], tmp_path: Path) -> None:
    scaler, task = DynamicScaler("cpu"), Task(breaks_at=3)
    fit(task, WatchCallback(tmp_path / "run", every=1, verdict=False), plugins=[PrecisionPlugin(scaler=scaler)])
    assert all(p.isfinite().all() for p in task.parameters())
    run = pl.Run(tmp_path / "run")
    assert [event.step for event in run.events() if event.kind == "skip"] == [3]
    assert run.scalars("scale")[1][4] == 2.0**15


def test_a_checkpoint_has_the_scaler(fit: Callable[..., Any], tmp_path: Path) -> None:
    first = fit(Task(breaks_at=1), plugins=[PrecisionPlugin(scaler=SpectralScaler("cpu"))])
    first.save_checkpoint(tmp_path / "end.ckpt")
    plugin = PrecisionPlugin(scaler=SpectralScaler("cpu"))
    fit(Task(), plugins=[plugin], checkpoint=str(tmp_path / "end.ckpt"), max_epochs=1)
    assert plugin.state_dict() == first.precision_plugin.state_dict()


def test_other_levels_and_needless_scalers_are_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="fp32, tf32, amp-fp16, amp-bf16; got 'fp16-master'"):
        PrecisionPlugin("fp16-master")
    with pytest.raises(pl.ArgumentError, match="no scaler at amp-bf16"):
        PrecisionPlugin("amp-bf16", scaler=DynamicScaler("cpu"))
