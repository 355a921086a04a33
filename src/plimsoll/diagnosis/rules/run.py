"""Rules of a run as a whole: ranks that differ, how it ended, and what of its record is missing."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from plimsoll.diagnosis.finding import Finding, Spot, shown
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Phrase, Rule, find_spans, threshold
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.tables.wiring_facts import facts
from plimsoll.diagnosis.view import View
from plimsoll.runs.reading import by_rank
from plimsoll.runs.reading.by_rank import ByRank
from plimsoll.tensor_collections import LABELS
from plimsoll.text import counted, one_line

_MEANING = {
    "exception": "The training did not reach its end: an exception ended it.",
    "interrupt": "The user ended the training.",
    "signal": "The system, a scheduler or a user ended the training's process by a signal.",
    "killed": "The training's process ended without closing the run: killed, out of memory, or its machine stopped.",
}
_ADVICE = {
    "exception": "Read the traceback that the process printed, and continue from the last checkpoint.",
    "interrupt": "No action is needed if this was intended. The findings are about the steps until then.",
    "signal": "Look for a time limit or a preemption, and continue from the last checkpoint.",
    "killed": "Look for an out-of-memory kill, a time limit or a lost machine. The last seconds may be missing.",
}
# A killed process leaves no message, and only the absence of its writer shows that it is gone.
_PHRASES = {
    "exception": "an exception ended the training",
    "interrupt": "the training was interrupted",
    "signal": "a signal ended the training",
}
_OF_A_KIND = (
    "Tensors of this kind are not measured. Look at them yourself, or have the model hold them as real numbers "
    "(torch.view_as_real)."
)
# Events by which a watch reports that it left something out.
_LEFT_OUT = ("failure", "not measured", "capped", "shadow", "rank lost", "folder lost", "dropped", "damaged")
_WEIGHTS, _BATCHES = "first weights", "batches"
_BLOCK = 5  # steps whose mean loss is judged as one


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """A rank away from the others: first and last step, its value, and the others'."""

    name: str
    rank: int
    since: int
    until: int
    own: float
    others: float


@dataclass(frozen=True, kw_only=True)
class RankDiffers(Rule):
    """Ranks that begin with different weights or read the same batches, or one that stays outside all others."""

    id = "rank-differs"
    says = (
        "ranks begin with different weights or read the same batches, or the loss or activations of one stay away from "
        "those of all others"
    )
    meaning = (
        "This rank gets other data or labels than the others, and its gradients pull all weights in that direction."
    )
    advice = "Compare one batch of this rank with one of another: its files, its labels, its normalisation, its shard."
    figure = "loss_and_scale"
    location_item = EvidenceItem("Times the size of the others")

    blocks: float = threshold(12, "blocks of five steps in a row: by chance the same of three ranks once in 10^5 runs")
    margin: float = threshold(0.5, "times the others' loss")
    level: float = threshold(0.1, "times the first loss: small losses differ by large factors")
    samples: float = threshold(10, "samples of activations in a row: by chance once in 10^4 layers")
    binades: float = threshold(1, "a factor of two between the sizes of activations")
    spread: float = threshold(2, "times the distance between the lowest and the highest of the other ranks")
    weights: float = threshold(0.001, "of a weight at the first step: copies of it are the same to the last bit")

    # The noise is measured: a rank must be further from the nearest other rank than the others are from each other, at
    # every block of steps (or sample) of a long row. Of two ranks nobody can say which one is wrong, so none is named.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield findings on the first weights, and on each rank's loss and activations."""
        yield from self._first_weights(view)
        parts = by_rank.parts_of(view.run)
        if not parts:
            return
        losses = _until(by_rank.losses(view.run, parts), view.until)
        yield from self._same_batches(losses)
        for found in self._losses(losses):
            yield self._finding(found, "loss", len(set(parts.values())), ())
        layers: dict[int, list[_Apart]] = {}
        for sizes in by_rank.activation_sizes(view.run, parts):
            for found in self._sizes(_until(sizes, view.until)):
                layers.setdefault(found.rank, []).append(found)
        for some in layers.values():
            first = min(some, key=lambda found: found.since)  # of several the first layer, which the others follow
            yield self._finding(first, "activations", len(set(parts.values())), some)

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the rank and both values. Of two ranks neither is named."""
        what, rank = context.text("of"), context.number("rank")
        if what == _WEIGHTS:
            return Phrase(
                what=f"{context.number('ranks'):.0f} ranks began with different weights, seen {context.since}",
                effect="and average gradients that fit none of their models",
                remedy="let DistributedDataParallel send rank 0's weights",
            )
        if what == _BATCHES:
            return Phrase(
                what=f"all {context.number('ranks'):.0f} ranks have had the same losses {context.since}",
                effect="so they read the same batches",
                remedy="give each its own: a DistributedSampler, or a seed by rank",
            )
        have = "has" if what == "loss" else "have"
        if not math.isfinite(rank):
            return Phrase(
                what=f"the {what} of the two ranks {have} differed {context.since}", remedy="compare their batches"
            )
        return Phrase(
            what=f"the {what} of rank {rank:.0f} {have} stayed away from those of the others {context.since}",
            effect=f"{context.number('its'):.3g} and not {context.number('others'):.3g}",
            remedy="compare its data and labels with another rank's",
        )

    def _first_weights(self, view: View) -> Iterator[Finding]:
        by_step: dict[int, dict[int, Mapping[str, Sequence[float]]]] = {}
        for event in facts(view, _WEIGHTS):
            weights = event.details.get("weights")
            if isinstance(weights, dict):
                by_step.setdefault(event.step, {})[event.rank] = cast("dict[str, list[float]]", weights)
        for step, ranks in by_step.items():
            shared = set[str].intersection(*(set(weights) for weights in ranks.values()))
            apart = [name for name in next(iter(ranks.values())) if name in shared and self._differ(ranks, name)]
            if apart:
                spots = [Spot(name=name, since_step=step) for name in apart]
                evidence: dict[str, float | int | str] = {"of": _WEIGHTS, "ranks": len(ranks), "weights": len(apart)}
                yield self.finding(
                    "alarm", spots, evidence, until_step=max(view.last_step, step), collection="weights",
                    meaning="The ranks began with different weights, and differ since: their gradients are averaged, "
                    "and fit none of their models.",
                    advice="Let DistributedDataParallel send rank 0's weights to all (init_sync=True, its default), or "
                    "set the same seed on every rank before the model is made.",
                )  # fmt: skip
                return

    def _differ(self, ranks: Mapping[int, Mapping[str, Sequence[float]]], name: str) -> bool:
        """Return True if most first values of a weight differ between any two ranks."""
        values = [np.array(weights[name], dtype=np.float64) for weights in ranks.values()]
        if len({len(some) for some in values}) != 1:
            return False
        sizes = np.abs(values).max(axis=0)
        return bool(((np.max(values, axis=0) - np.min(values, axis=0)) > self.weights * sizes).mean() > 0.5)

    # Rounding alone makes the losses of other batches differ, if nothing else does.
    def _same_batches(self, losses: ByRank) -> Iterator[Finding]:
        """Yield one finding if the losses of all ranks are the same, bit for bit."""
        there = np.isfinite(losses.values).all(axis=0)
        values, steps = losses.values[:, there], losses.steps[there]
        if len(values) < 2 or len(steps) < self.blocks * _BLOCK or not (values == values[0]).all():
            return
        if len(np.unique(values[0])) * 2 < len(steps):  # a loss that stays may be the same for any batch
            return
        yield self.finding(
            "warning", (), {"of": _BATCHES, "ranks": len(values)}, since_step=int(steps[0]), until_step=int(steps[-1]),
            meaning=f"All {len(values)} ranks compute the same losses: they read the same batches, and do the work of "
            "one rank.",
            advice="Give the loader a DistributedSampler, or draw batches by a seed that depends on the rank.",
        )  # fmt: skip

    def _losses(self, losses: ByRank) -> Iterator[_Apart]:
        blocks = len(losses.steps) // _BLOCK
        if len(losses.ranks) < 2 or not blocks:
            return
        means = losses.values[:, : blocks * _BLOCK].reshape(len(losses.ranks), blocks, _BLOCK).mean(axis=2)
        first = float(np.median(np.abs(means[:, 0])))
        ends = losses.steps[_BLOCK - 1 : blocks * _BLOCK : _BLOCK]

        def least(others: Floats) -> Floats:
            return np.maximum(self.margin * np.abs(np.median(others, axis=0)), self.level * first)

        starts = losses.steps[: blocks * _BLOCK : _BLOCK]
        for rank, a, b, own, others in self._apart(means, least, self.blocks):
            yield _Apart(
                name="loss", rank=losses.ranks[rank], since=int(starts[a]), until=int(ends[b]), own=own, others=others
            )

    def _sizes(self, sizes: ByRank) -> Iterator[_Apart]:
        if len(sizes.ranks) < 2 or not len(sizes.steps):
            return
        with np.errstate(all="ignore"):
            logs = np.log2(sizes.values)
        logs = np.where(np.isfinite(logs), logs, np.nan)
        steps = sizes.steps
        for rank, a, b, own, others in self._apart(logs, lambda _: np.full(len(steps), self.binades), self.samples):
            yield _Apart(
                name=sizes.name, rank=sizes.ranks[rank], since=int(steps[a]), until=int(steps[b]),
                own=2.0**own, others=2.0**others,
            )  # fmt: skip

    def _apart(
        self, values: Floats, least: Callable[[Floats], Floats], lasting: float
    ) -> Iterator[tuple[int, int, int, float, float]]:
        """Yield distant ranks: number, first and last place, own median and others'."""
        ranks = len(values) if len(values) > 2 else 1  # of two, each is away from the other
        for rank in range(ranks):
            others = np.delete(values, rank, axis=0)
            lowest, highest = others.min(axis=0), others.max(axis=0)
            away = np.maximum(least(others), self.spread * (highest - lowest))
            for holds in (values[rank] - highest > away, lowest - values[rank] > away):
                for a, b in find_spans(holds, lasting)[:1]:
                    there = slice(a, b + 1)
                    yield rank, a, b, float(np.median(values[rank, there])), float(np.median(others[:, there]))

    def _finding(self, found: _Apart, what: str, ranks: int, layers: Sequence[_Apart]) -> Finding:
        spots = [Spot(name=each.name, since_step=each.since, value=each.own / each.others) for each in layers]
        named = ranks > 2
        whose = f"the {what} of rank {found.rank}" if named else f"the {what} of one rank"
        where = f" in {found.name}" if layers else ""
        compared = f"{found.own:.3g}{where}, and {found.others:.3g} on the other{'s' if named else ''}"
        evidence: dict[str, float | int | str] = {"of": what, "ranks": ranks}
        evidence |= {"rank": found.rank} if named else {}
        evidence |= {"its": found.own, "others": found.others}
        size = "The size of " if layers else ""
        text = f"{size}{whose} is {compared}: it has other data or labels."
        return self.finding(
            "warning", spots, evidence,
            since_step=found.since,
            until_step=max([found.until, *(each.until for each in layers)]),
            collection="activations" if layers else None,
            meaning=text[0].upper() + text[1:],
        )  # fmt: skip


def _until(found: ByRank, until: int | None) -> ByRank:
    there = slice(None) if until is None else found.steps <= until
    return ByRank(name=found.name, ranks=found.ranks, steps=found.steps[there], values=found.values[:, there])


@dataclass(frozen=True, kw_only=True)
class RunEnded(Rule):
    """A run that an exception, an interrupt, a signal or a kill has ended."""

    id = "run-ended"
    says = "the training ended early: by an exception, an interrupt, a signal, or killed"
    meaning = "The training did not reach its end."
    advice = "Read what the process printed, and continue from the last checkpoint."
    figure = "loss_and_scale"
    is_secondary = True
    is_noted = True

    later: float = threshold(1, "step recorded afterwards: the training was continued")

    # The numbers may be fine. A run that was continued from a checkpoint has not ended.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        ending = view.ending
        if ending is None or view.last_step >= ending.step + self.later:
            return
        evidence = {"ended_by": ending.how, "message": ending.message, "step": ending.step}
        yield self.finding(
            "warning" if ending.how in ("exception", "killed") else "info",
            (),
            evidence,
            since_step=ending.step,
            until_step=ending.step,
            meaning=_MEANING[ending.how],
            advice=_ADVICE[ending.how],
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return how the run ended, and the message."""
        by = context.text("ended_by")
        return Phrase(
            what=f"{_PHRASES.get(by, 'the process was gone without closing the run')} {context.at}",
            effect=one_line(str(context.finding.evidence.get("message", ""))) if by in _PHRASES else "",
            remedy="" if by == "interrupt" else "continue from the last checkpoint",
        )


@dataclass(frozen=True, kw_only=True)
class RecordsLost(Rule):
    """Dropped samples, unmeasured tensors, missing parts and ranks."""

    id = "records-lost"
    says = "the watch dropped records, or parts of the run are damaged or missing"
    meaning = "The findings come from the remaining records. The missing ones may have been worse."
    advice = (
        "See the run's problems, its dropped counts and its events. A full disk or too small a queue is the usual "
        "cause."
    )
    figure = "record"
    is_secondary = True

    records: float = threshold(1, "no record may be lost silently")

    # All other findings are judged by the rest. Nothing is wrong with the training by this. A few tensors that are left
    # out are a note. If the watch has failed to record a collection at all, rules that would have found a fault in it
    # were silent, and their silence is no sign of health.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding, of the whole run."""
        dropped, problems = view.run.dropped, view.run.problems
        events = [event for event in view.events if event.kind in _LEFT_OUT]
        if sum(dropped.values()) + len(problems) + len(events) < self.records:
            return
        evidence: dict[str, float | int | str] = {f"dropped: {reason}": n for reason, n in sorted(dropped.items())}
        if problems:
            evidence |= {"problems": len(problems), "first_problem": problems[0]}
        if events:
            evidence |= {"events": len(events), "first_event": events[0].message}
        steps = [event.step for event in events]
        since, until = (min(steps), max(steps)) if steps else (0, max(view.last_step, 0))
        if lost := _lost_collections(view):
            causes = list(dict.fromkeys(lost.values()))
            evidence |= {"not_recorded": ", ".join(LABELS[name] for name in lost), "failure": causes[0]}
            yield self.finding(
                "warning", (), evidence, since_step=since, until_step=until,
                meaning=f"The watch itself failed, and nothing was recorded of: {evidence['not_recorded']}. No rule "
                f"has judged them. {causes[0]}.",
                advice="Report the failure with the messages of the run's events. A run that records them may show "
                "faults that this one cannot.",
            )  # fmt: skip
            return
        severity = "warning" if dropped or problems else "info"
        kinds = not dropped and not problems and all(event.kind == "not measured" for event in events)
        yield self.finding(
            severity, (), evidence, since_step=since, until_step=until, advice=_OF_A_KIND if kinds else None
        )

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the number of dropped records, and the first problem."""
        evidence = context.finding.evidence
        if "not_recorded" in evidence:
            return Phrase(
                what=f"the watch failed to record {context.text('not_recorded')}, so this is judged by the rest",
                effect=shown(context.text("failure").replace(" failed and was left out", "")),
                remedy="report the failure",
            )
        counts = [n for name, n in evidence.items() if name.startswith("dropped") and isinstance(n, int)]
        lost = "parts of the run are missing or were not measured"
        if sum(counts):
            lost = f"{counted(sum(counts), 'record')} {'was' if sum(counts) == 1 else 'were'} dropped"
        problem = evidence.get("first_problem", evidence.get("first_event", ""))
        return Phrase(
            what=f"{lost} {context.since}, so this is judged by the rest",
            effect=shown(str(problem)) if problem else "",
        )


def _lost_collections(view: View) -> dict[str, str]:
    """Return the collections of which nothing was recorded because the watch failed, each with the failure."""
    collected = view.run.settings.get("collect")
    wanted = set(cast("Mapping[str, object]", collected)) if isinstance(collected, Mapping) else set[str]()
    failures: dict[str, str] = {}
    for event in view.events:
        # A sample is written after its step. So at the last step of a run that goes on, nobody knows what it lacks.
        if event.kind == "failure" and (view.run.closed or event.step < view.last_step):
            of = event.details.get("collections")
            for name in cast("list[object]", of) if isinstance(of, list) else []:
                if name in wanted and isinstance(name, str):
                    failures.setdefault(name, event.message)
    return {name: failures[name] for name in LABELS if name in failures and view.cells(name) is None}
