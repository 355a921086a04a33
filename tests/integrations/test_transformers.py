"""Hugging Face's Trainer, the real one, on a small GPT-2 with random weights."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import plimsoll as pl
from plimsoll.integrations.transformers import WatchCallback


class Tokens(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * 7 + index) % 50
        return {"input_ids": tokens, "labels": tokens}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2))


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., GPT2LMHeadModel]:
    def train(*callbacks: Any, resume: bool | str = False, trained: Any = None, **settings: Any) -> GPT2LMHeadModel:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "hf"), per_device_train_batch_size=2, report_to="none", logging_steps=2,
            use_cpu=True, disable_tqdm=True, seed=0,
            **{"max_steps": 6, "save_strategy": "no", **settings},
        )  # fmt: skip
        trained = model() if trained is None else trained
        trainer = Trainer(
            model=trained, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks)
        )
        trainer.train(resume_from_checkpoint=resume)
        return trained

    before = dict(os.environ)
    yield train
    for name in os.environ.keys() - before.keys():  # the trainer's own
        del os.environ[name]


def test_a_training_is_recorded_step_by_step(train: Callable[..., Any], tmp_path: Path) -> None:
    callback = WatchCallback(tmp_path / "run", every=2)
    train(callback, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3)
    run = pl.Run(tmp_path / "run")
    assert run.closed and list(run.steps) == [0, 2, 4] and callback.watch is None
    assert "transformer.h.0.attn.c_attn.weight" in run.tensors["gradients"]
    assert "transformer.wte.weight:exp_avg_sq" in run.tensors["optimizer"]
    assert len(run.scalars("loss")[0]) == 6 and len(run.scalars("logged_loss")[0]) == 3
    assert {"learning_rate", "grad_norm", "eval_loss"} <= set(run.scalar_names)
    assert len(run.scalars("epoch")[0]) >= 3 and (run.scalars("epoch")[1] > 0).all()
    arguments = run.settings["arguments"]
    assert (arguments["per_device_train_batch_size"], arguments["max_steps"], arguments["seed"]) == (2, 6, 0)


def test_watching_changes_no_bit(train: Callable[..., Any], tmp_path: Path) -> None:
    watched, alone = train(WatchCallback(tmp_path / "run", every=1)), train()
    assert all(torch.equal(a, b) for a, b in zip(watched.parameters(), alone.parameters(), strict=True))


def test_a_training_resumed_goes_on_in_its_run(train: Callable[..., Any], tmp_path: Path) -> None:
    train(WatchCallback(tmp_path / "run", every=1), max_steps=5, save_strategy="steps", save_steps=4)
    first = pl.Run(tmp_path / "run").scalars("loss")
    again = {"resume": str(tmp_path / "hf" / "checkpoint-4"), "max_steps": 6}
    train(WatchCallback(tmp_path / "run", every=1), **again)
    run = pl.Run(tmp_path / "run")
    assert list(run.steps) == list(range(6))
    assert run.scalars("loss")[1][:5].tolist() == first[1].tolist()


def test_an_alarm_is_warned_of_at_the_end(train: Callable[..., Any], tmp_path: Path) -> None:
    broken = model()
    with torch.no_grad():
        broken.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    callback = WatchCallback(tmp_path / "run", every=1)
    with pytest.warns(RuntimeWarning, match=f"plimsoll: .*NaN.*plimsoll check {tmp_path}/run"):
        train(callback, trained=broken)
    assert callback.findings[0].severity == "alarm"


def test_a_guard_stops_a_training(train: Callable[..., Any], tmp_path: Path) -> None:
    broken = model()
    with torch.no_grad():
        broken.transformer.h[1].mlp.c_fc.weight[0, 0] = torch.nan
    guard = {"actions": ("stop",), "dry_run": False, "every": 2, "cpu_share": 1.0}
    with pytest.raises(pl.GuardStop):
        train(WatchCallback(tmp_path / "run", every=1, guard=guard), trained=broken, max_steps=2000)


def test_a_callback_left_open_by_an_error_begins_anew(train: Callable[..., Any], tmp_path: Path) -> None:
    callback, broken = WatchCallback(tmp_path / "run", every=1), model()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    handle = broken.transformer.h[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no more memory"):
        train(callback, trained=broken)
    handle.remove()
    train(callback, trained=broken)
    run = pl.Run(tmp_path / "run")
    assert run.closed and len(run.scalars("loss")[0]) == 6


def test_settings_that_the_trainer_knows_are_refused() -> None:
    with pytest.raises(pl.ArgumentError, match="WatchCallback: expected settings .* got optimizer"):
        WatchCallback("run", optimizer=None)
