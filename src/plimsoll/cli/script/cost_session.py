"""`plimsoll doctor --cost`: the cost of watching a script, or a transformer."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (its usual name)

from plimsoll.cli.script import runner
from plimsoll.watch import watch
from plimsoll.watch.cost import NEVER, CostProbe, CostReport
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.model_finder import Finder, Found
from plimsoll.watch.steps.step_boundary import Steps

_WIDTH, _LAYERS, _HEADS, _VOCABULARY, _BATCH, _SEQUENCE = 256, 6, 4, 1024, 4, 64


class Transformer(nn.Module):
    """A decoder-only transformer of 5 million parameters, as in the benchmarks."""

    def __init__(self, layers: int = _LAYERS, width: int = _WIDTH) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, _HEADS, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token after each."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(self.tokens(tokens), mask=mask, is_causal=True))


def measure_example(rounds: int, layers: int = _LAYERS, width: int = _WIDTH) -> CostReport:
    """Train a small transformer on the CPU, and return the cost of watching it."""
    reports: list[CostReport] = []
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer(layers, width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        with watch(model, optimizer, run=Path(folder) / "run", every=NEVER, quiet=True):
            steps = next(steps for steps in _all_steps() if steps.session.model() is model)
            probe = CostProbe(steps, optimizer, rounds, reports.append)
            while not probe.finished:
                batch = torch.randint(_VOCABULARY, (_BATCH, _SEQUENCE + 1), device="cpu")
                optimizer.zero_grad()
                F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
                optimizer.step()
    return reports[0]


STEPS_OF_ROUND = 18  # two of each kind; the round before the first warms up


class CostSession:
    """The training of one script, which ends when the cost of watching it is known.

    `show` prints the report, `say` a line to standard error.
    """

    def __init__(self, rounds: int, show: Callable[[CostReport], None], say: Callable[[str], None]) -> None:
        self._rounds, self._show, self._say = rounds, show, say
        folder = tempfile.mkdtemp()
        # At exit, when finalizers run, the watch has closed: `runner.listen` keeps this object until then.
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._probe: CostProbe | None = None
        self._report: CostReport | None = None
        self._process = os.getpid()
        settings = {"every": NEVER, "quiet": True}
        self._finder = Finder(lambda: Path(folder) / "run", settings, on_found=self._begin, say=say)

    def run(self, script: str, arguments: Sequence[str], *, as_module: bool) -> None:
        """Run the script until the cost is known, and report it.

        If too few steps were seen, the exit code is 2.
        """
        runner.listen(self._note)
        try:
            runner.execute(script, arguments, as_module=as_module)
        except SystemExit:  # the probe's, or the script's own
            if os.getpid() != self._process:
                raise
        if os.getpid() != self._process:
            return
        if self._report is None:
            why = self._finder.verdict() or (
                "the script ended before enough of its steps were measured; let it take "
                f"{STEPS_OF_ROUND * (self._rounds + 1)} of them, or measure fewer --rounds"
            )
            self._say(f"doctor: the cost was not measured: {why}")
            raise SystemExit(2)
        self._show(self._report)

    def _note(self, optimizer: Any) -> None:
        if os.getpid() == self._process:
            self._finder.note(optimizer)

    def _begin(self, found: Found) -> None:
        """A model is watched from now on; the first one is measured."""
        if self._probe is None:
            steps = next(s for s in _all_steps() if Path(s.session.writer.path) == found.path)
            self._probe = CostProbe(steps, steps.parameters.optimizers[0], self._rounds, self._finish)

    def _finish(self, report: CostReport) -> None:
        self._report = report
        raise SystemExit(0)  # leaves the script


def _all_steps() -> list[Steps]:
    return [listener for listener in torch_hooks.listeners() if isinstance(listener, Steps)]
