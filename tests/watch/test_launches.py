"""Launches that a sampled step takes on a GPU, counted in Triton's interpreter."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import plimsoll as pl
from plimsoll import kernels
from tests.support.cases import each
from tests.support.spectra import same_tables
from tests.support.watch.recording import only_run

pytest.importorskip("triton", reason="the package triton is not installed")
if not any(status.name == "triton" and status.available for status in kernels.report()):
    pytest.skip("Triton needs TRITON_INTERPRET=1 here, before it is imported", allow_module_level=True)

from plimsoll.kernels.triton_backend import measuring, nonfinite, unscaling, updates

MOST = 12  # launches in a step of the GPT of 124M
KERNELS = {
    measuring: ("measure_tensor", "measure_table"),
    nonfinite: ("count_tensor", "count_table"),
    unscaling: ("unscale_tensor", "unscale_table"),
    updates: ("update_tensor", "update_table"),
}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.c_attn, self.c_proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc, self.gelu, self.c_proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The modules of GPT-2 with 124M parameters, with two features to a head."""

    def __init__(self, layers: int = 12, heads: int = 12, vocabulary: int = 50, context: int = 4) -> None:
        super().__init__()
        width = 2 * heads
        self.wte, self.wpe, self.drop = nn.Embedding(vocabulary, width), nn.Embedding(context, width), nn.Dropout(0.1)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def train(model: GPT, steps: int, *, amp: bool = False, after: Callable[[], object] = lambda: None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        tokens = torch.randint(model.wte.num_embeddings, (2, model.wpe.num_embeddings + 1))
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def counted(patch: pytest.MonkeyPatch) -> Counter[str]:
    """The launches of each kernel, which do nothing else."""
    launches: Counter[str] = Counter()

    class Counts:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *_, **__: launches.update([self.name])

    for module, names in KERNELS.items():
        for name in names:
            patch.setattr(module, name, Counts(name))
    return launches


@each("amp", [False, True])
def test_a_sampled_step_of_the_gpt_of_124m_takes_twelve_launches_at_most(amp: bool, tmp_path: Path) -> None:
    """Of the first sampled step on, in which each tap is on trial, measures at once, and is measured again."""
    by_step: list[dict[str, int]] = []
    with pytest.MonkeyPatch.context() as patch, kernels.use("triton"):
        launches = counted(patch)
        torch.manual_seed(0)
        model = GPT()
        with pl.watch(model, run=tmp_path / str(amp), every=1):
            train(model, 3, amp=amp, after=lambda: (by_step.append(dict(launches)), launches.clear()))
    run = only_run(tmp_path / str(amp))
    taps = len(run.tensors["activations"])
    assert taps > 12 * 18 and len(run.tensors["optimizer"]) == 3 * len(run.tensors["weights"]) == 3 * 148
    first, *later = by_step
    assert sum(first.values()) > 12 * 20
    assert all(0 < sum(step.values()) <= MOST for step in later), later
    assert all(step.keys() == {"measure_table", "update_table"} for step in later), "none of one tensor alone"


def test_what_the_interpreter_counts_of_a_queue_is_what_a_cpu_counts(tmp_path: Path) -> None:
    """Dropout in place, too, and a residual that is added in place."""

    class Small(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.wte(tokens)
            x += self.wpe(torch.arange(tokens.shape[1]))
            for block in self.h:
                x = block(x)
                x = functional.relu(x, inplace=True)
            return self.lm_head(self.ln_f(x))

    def record(folder: Path) -> Any:
        torch.manual_seed(0)
        model = Small(layers=1, heads=2)
        model.h[0].mlp.dropout.inplace = True
        with pl.watch(model, run=folder, every=1, collect=("activations", "activation_gradients")):
            train(model, 2)
        return only_run(folder)

    at_once = record(tmp_path / "at once")
    with kernels.use("triton"):
        queued = record(tmp_path / "queued")
    assert same_tables(queued.table(), at_once.table())
    assert not [event for event in queued.events() if event.kind in ("failure", "not measured")]
