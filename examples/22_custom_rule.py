"""Your own rule: one class that finds a problem and explains it. It appears wherever Plimsoll's rules do."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import EvidenceItem, Finding, FindingContext, Phrase, Rule, View, threshold
from plimsoll.report import summary

STEPS = 40


@dataclass(frozen=True, kw_only=True)
class LossFlat(Rule):
    """The loss is as high at the end as at the start."""

    id = "loss-flat"
    says = "the loss does not fall"
    meaning = "The model does not learn."
    advice = "Check the learning rate and the data."
    figure = "loss_and_scale"
    items = {"fallen": EvidenceItem("Fallen by", "share")}  # noqa: RUF012  (`Rule` declares the ClassVar)

    fall: float = threshold(0.02, "of the first losses: less is noise")

    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        steps, loss = view.scalar("loss")
        first, last = float(np.median(loss[:5])), float(np.median(loss[-5:]))
        fallen = max(first - last, 0.0) / first
        if fallen < self.fall:
            evidence = {"fallen": fallen}
            yield self.finding("warning", (), evidence, since_step=int(steps[0]), until_step=int(steps[-1]))

    def phrase(self, context: FindingContext) -> Phrase:
        """Return by how much the loss has fallen."""
        fallen = f"{context.number('fallen'):.0%}"
        return Phrase(what=f"the loss has fallen by {fallen} {context.since}", remedy="check the learning rate")


def trained(folder: str, rate: float) -> str:
    """Train a small model and return the folder of its run."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    x = torch.randn(64, 8)
    target = x.sum(1, keepdim=True)
    with pl.watch(model, optimizer, run=folder):
        for _ in range(STEPS):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target).backward()
            optimizer.step()
    return folder


with tempfile.TemporaryDirectory() as runs:
    for rate in (1e-6, 1e-1):
        folder = trained(f"{runs}/{rate}", rate)
        # An id, a glob or a rule: all are selected in one list. The entry point of a package needs no selection.
        findings = pl.diagnose(folder, rules=["loss-*", LossFlat()])
        print(f"rate {rate}: {summary(folder, findings).verdict}")
        assert [finding.rule for finding in findings] == (["loss-flat"] if rate < 1e-3 else [])
