"""The largest attention score of each head, against scores that tests compute themselves."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll import kernels, row_layout
from plimsoll.runs import Run
from plimsoll.watch.taps import module_taps
from tests.support.cases import each

NAME = "attention:scores"


class Attention(nn.Module):
    """Two heads over eight features; the call's settings are the test's."""

    def __init__(self, groups: bool = False, **settings: Any) -> None:
        super().__init__()
        self.queries, self.keys = nn.Linear(8, 8), nn.Linear(8, 4 if groups else 8)
        self.groups, self.settings, self.seen = groups, settings, []

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (-1, 4)).transpose(1, 2) for m in (self.queries, self.keys))
        self.seen.append((q.detach().double(), k.detach().double()))
        return functional.scaled_dot_product_attention(q, k, k, enable_gqa=self.groups, **self.settings)


class Model(nn.Module):
    def __init__(self, attention: nn.Module, keep: bool = True) -> None:
        super().__init__()
        self.attention, self.head, self.keep = attention, nn.Linear(4, 1), keep

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x) if self.keep else checkpoint(self.attention, x, use_reentrant=False)
        return self.head(y).float().square().mean()


def run_of(model: nn.Module, folder: Path, steps: int = 2, call: Any = None, **watch: Any) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=folder, **{"every": 1, **watch}):
        for k in range(steps):
            torch.manual_seed(k)
            (model if call is None else call)(torch.randn(3, 7, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return Run(folder)


def mask_of(fill: float) -> Tensor:
    return torch.full((7, 7), fill).triu(1)


CASES = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 3.0},
    "added": {"attn_mask": mask_of(-5.0)},
    "boolean": {"attn_mask": torch.ones(7, 7).tril().bool()},
    "one row for all": {"attn_mask": torch.tensor([[True] * 5 + [False] * 2])},
    "groups": {"groups": True},
}


@each("settings", CASES.values(), ids=list(CASES))
def test_largest_score_of_each_head(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(1)
    attention = Attention(**settings)
    run = run_of(Model(attention), tmp_path / str(len(list(tmp_path.iterdir()))))
    q, k = attention.seen[0]
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q @ k.mT * settings.get("scale", 1 / math.sqrt(4))
    mask = settings.get("attn_mask", torch.ones(7, 7).tril().bool() if settings.get("is_causal") else torch.zeros(7, 7))
    scores = scores + (torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask)
    largest = scores.amax((-2, -1))
    spectrum = run.spectrum("activations", NAME, 0)
    assert spectrum.count == largest.numel()
    assert spectrum.max == pytest.approx(float(largest.max()), rel=1e-5)
    assert spectrum.mean == pytest.approx(float(largest.mean()), rel=1e-5, abs=1e-6)


@each("setting", ["autocast in FP16", "emulation of all operations"])
def test_scores_beyond_half_precision_are_finite(tmp_path: Path, setting: str) -> None:
    """The kernel scales before it rounds; a product in FP16 would overflow, and be a NaN that the training has not."""
    torch.manual_seed(1)
    attention = Attention(scale=1e-4)
    model = Model(attention)
    with torch.no_grad():
        attention.queries.weight.mul_(1e3), attention.keys.weight.mul_(1e3)

    def call(x: Tensor) -> Tensor:
        if setting == "autocast in FP16":
            with torch.autocast("cpu", torch.float16):
                return model(x)
        with pl.emulate(forward="fp16", operations="all"):
            return model(x)

    run = run_of(model, tmp_path / setting, 1, call)
    q, k = attention.seen[0]
    spectrum = run.spectrum("activations", NAME, 0)
    largest = (q @ k.mT).amax((-2, -1)) * 1e-4
    assert float(largest.max()) * 1e4 > 65504 and spectrum.nonfinite == 0
    assert spectrum.max == pytest.approx(float(largest.max()), rel=1e-3)


class Plain(nn.Module):
    """Attention of each value to all."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x)[..., :4]


def test_rows_of_long_sequences_are_sampled(tmp_path: Path) -> None:
    attention = Attention()
    model = Model(attention)
    with pl.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=tmp_path / "run", every=1) as watching:
        x = torch.zeros(1, 200, 8)
        x[:, -1] = 50.0  # the last row is among those that are looked at
        model(x).backward()
        watching.step()
    q, k = attention.seen[0]
    spectrum = Run(tmp_path / "run").spectrum("activations", NAME, 0)
    assert spectrum.count == 2
    assert spectrum.max == pytest.approx(float((q @ k.mT).amax()) / 2, rel=1e-5)


def test_training_is_as_without(tmp_path: Path) -> None:
    def weights(folder: Path, **watch: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = Model(Attention(dropout_p=0.3))
        run_of(model, folder, 4, **watch)
        return [p.detach().clone() for p in model.parameters()]

    for one, other in zip(weights(tmp_path / "a"), weights(tmp_path / "b", collect=("gradients",)), strict=True):
        assert torch.equal(one, other)


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    original = functional.scaled_dot_product_attention
    run_of(Model(Attention()), tmp_path / "run")
    assert functional.scaled_dot_product_attention is original


def test_only_due_steps_and_once_with_checkpoints(tmp_path: Path) -> None:
    attention = Attention()
    run = run_of(Model(attention, keep=False), tmp_path / "run", 4, every=2)
    steps, _ = run.series("activations", NAME, "max")
    assert list(steps) == [0, 2]
    assert run.spectrum("activations", NAME, 0).count == 6


def test_compiled_code_is_not_seen_and_not_broken(tmp_path: Path) -> None:
    model = Model(Plain())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    run = run_of(model, tmp_path / "run", call=compiled)
    assert not [name for name in run.tensors["activations"] if name.endswith(":scores")]
    assert not [event for event in run.events() if event.kind == "error"]


def test_attention_of_torch_is_seen(tmp_path: Path) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0].square().mean()

    run = run_of(Own(), tmp_path / "run")
    assert run.spectrum("activations", NAME, 0).count == 6


def test_no_device_is_waited_for() -> None:
    """On a meta tensor nothing works whose shape depends on values, as nothing may that waits for a GPU."""
    q, k = torch.empty(2, 3, 50, 4, device="meta"), torch.empty(2, 3, 60, 4, device="meta")
    mask = torch.empty(50, 60, dtype=torch.bool, device="meta")
    for rest in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask.float()}):
        scores = module_taps.largest_scores(q, k, rest)
        assert scores is not None and scores.shape == (6,), rest


def test_heads_that_a_mask_hides_are_left_out_of_a_row_too() -> None:
    scores = torch.tensor([3.0, -math.inf, 0.0, -2.0, -math.inf, math.inf])
    bank = kernels.new_bank(2, 32)
    kernels.measure_into([scores, scores[scores > -math.inf]], bank, [0, 1], block=32)
    module_taps.leave_out_masked(bank[0])
    assert bank[0, row_layout.BLOCKS] == 0, "no blocks: these would hold other neighbours"
    assert torch.equal(bank[0, : row_layout.NARROW], bank[1, : row_layout.NARROW])


def test_attention_on_another_thread_is_not_the_models(tmp_path: Path) -> None:
    """Another model that runs meanwhile, as one that makes data, is not what the watched module computes."""

    class Meanwhile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as other:
                other.submit(functional.scaled_dot_product_attention, 9 * x, 9 * x, x).result()
            return functional.scaled_dot_product_attention(x, x, x)[..., :4]

    def largest(name: str, attention: nn.Module) -> float:
        run = run_of(Model(attention), tmp_path / name)
        (series,) = [series for series in run.tensors["activations"] if series.endswith(":scores")]
        return run.spectrum("activations", series, 0).absmax

    assert largest("meanwhile", Meanwhile()) == largest("alone", Plain())


def test_heads_of_nan_are_counted_where_masked_ones_are_left_out() -> None:
    query, key = torch.randn(1, 3, 7, 4), torch.randn(1, 3, 7, 4)
    query[0, 1, 2, 0] = math.nan
    mask = torch.ones(1, 3, 7, 7, dtype=torch.bool)
    mask[0, 2] = False
    scores = module_taps.largest_scores(query, key, {"attn_mask": mask})
    assert scores is not None and len(scores) == 2 and scores.isnan().sum() == 1


def test_a_wrapper_that_is_put_around_attention_meanwhile_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", original)  # put back as the test ends
    model = Model(Attention())
    with pl.watch(model, run=tmp_path / "run", quiet=True):
        inner = functional.scaled_dot_product_attention

        @functools.wraps(inner)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            return inner(*args, **kwargs)

        functional.scaled_dot_product_attention = wrapper
    assert functional.scaled_dot_product_attention is wrapper
    assert run_of(Model(Attention()), tmp_path / "wrapped").spectrum("activations", NAME, 0).count == 6  # once
    assert functional.scaled_dot_product_attention is wrapper
    functional.scaled_dot_product_attention = original
    assert run_of(Model(Attention()), tmp_path / "restored").spectrum("activations", NAME, 0).count == 6
    assert functional.scaled_dot_product_attention is original
