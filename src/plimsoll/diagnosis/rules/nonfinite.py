"""Rule of NaN and Inf: whether they matter, and where they were first."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from plimsoll.diagnosis.finding import Finding, Spot
from plimsoll.diagnosis.rules.base import EvidenceItem, FindingContext, Mask, Phrase, Rule, find_spans, threshold
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.trend import Span, first_of_deciding, reaching
from plimsoll.diagnosis.tables.wiring_facts import largest_input
from plimsoll.diagnosis.view import View
from plimsoll.tensor_collections import FORWARD, IN_STEP_ORDER, WITH_LOSS_SCALE
from plimsoll.text import counted, number, power

# In the order in which one makes the other non-finite; of gradients the last layer is the first to have them.
_ORDER = tuple(c.name for c in IN_STEP_ORDER if c.overflow_order is not None)
_BEYOND_REPAIR = (
    "The weights contain NaN or Inf, so nothing trains any more. plimsoll.locate finds the operation from the weights "
    "before. Fix it, and restore the last checkpoint with finite weights, or start again. Then let steps with such "
    "gradients be skipped, by a loss scaler or prepare."
)
_WIDE = 2.0**100  # formats that reach above it do not overflow by a loss scale
_NEAR = 2.0**-6  # of a format's largest value: finite values beside those that overflowed reach that high
_FALL = 4.0  # a scaler that searches for its scale falls by more within ten skipped steps
_OF_GRADIENTS = tuple(
    name for name in _ORDER if name not in FORWARD
)  # an overflow that a scaler skips is seen there too
_TOO_HIGH = "the loss scale is too high"
_UNDEFINED = "no overflow of gradients: nothing is near their format's largest value"
_ROOM = 16.0  # powers of two: a step with values that many times as large as its neighbours' does not come again
_LEAST = 3  # such steps, with sound samples between them
_WHY_UNDEFINED = (
    "An operation gave NaN by itself, such as 0 / 0, the log of 0, or a division by an epsilon that the format rounds "
    "to 0 (FP16: below 2^-25, which is 3e-8). "
)
_FAR_BELOW = (
    "The gradients of {:,} steps held NaN or Inf, and the loss scale did not make it: gradients recorded around these "
    "steps lie 2^{:.0f} or more below the largest number of their format."
)
_NO_SCALE_HELPS = (
    f"No loss scale helps. {_WHY_UNDEFINED}plimsoll.locate finds it. Compute it in FP32, or with a larger epsilon."
)
_OF_PLACE = {
    "input": "Look at the data: the batch of that step contains NaN or Inf already.",
    "loss": "Look at the loss function and its targets: a mean over no element is NaN, the log of 0 is -Inf, and in "
    "FP16 exponentials and sums beyond 65,504 are Inf.",
    "buffers": "Keep these buffers in FP32 if they have 16 bits, where running statistics overflow. In FP32, the "
    "values that they average are too large: look at the layers before them, and lower the learning rate.",
    "compiled": "plimsoll.locate runs compiled models eagerly, and finds the operation.",
}
_OF_GIVEN = {
    "targets": "the targets of the loss",
    "weights": "the weights of the loss",
    "constant": "the constants of the loss (targets, weights, masks, factors)",
}  # that the watch has found broken where the graph makes them of nothing
_LOOK_AT_GIVEN = "Look at the data, and at what computes {} from it. No layer made this NaN or Inf."
_SKIP = "Skip such batches if they are few."
_RESTORE = "Restore the last checkpoint if the weights contain any."
_BETWEEN_SAMPLES = (
    'To find the location, train again with recorder=("loss", "scale", "nonfinite", "weights", "activations") in '
    "plimsoll.watch (plimsoll run --recorder), which measures these at every step."
)


_WITHOUT_LAYER = ("loss", "targets", "compiled")  # places that are no one layer's
_NO_COLLECTION = dict.fromkeys(_WITHOUT_LAYER)

_Place = tuple[int, str, list[str]]  # a step, a collection or another word for where, and names


@dataclass(frozen=True, kw_only=True)
class Nonfinite(Rule):
    """NaN or Inf in loss, weights, activations or gradients, and the first place."""

    id = "nonfinite"
    says = "NaN or Inf in the loss, weights, activations or unscaled gradients, and where it began"
    meaning = "A value overflowed or was undefined, and every result computed from it is lost."
    advice = f"Look at the location: plimsoll.locate finds the operation. {_SKIP} {_RESTORE}"
    actions = ("skip", "rollback", "stop")
    figure = "loss_and_scale"
    items = {
        "steps": EvidenceItem("Steps with NaN or Inf"),
        "steps_with_loss": EvidenceItem("Of these with the loss", hide_zero=True),
        "steps_with_gradients": EvidenceItem("Of these with gradients", hide_zero=True),
        "skipped": EvidenceItem("Of these skipped", hide_zero=True),
        "first_seen_in": EvidenceItem("First seen in", "place"),
        "first_seen_at": EvidenceItem("First seen at step"),
        "weights_since": EvidenceItem("Seen in the weights at step"),
        "steps_before": EvidenceItem("Earlier steps, after which the run recovered"),
        "largest_input": EvidenceItem("Largest input of that step"),
        "usual_input": EvidenceItem("Largest input at samples before"),
    }

    skips: float = threshold(25, "steps in a row: from 2^24 a scale halves 24 times down to 1")
    fixed: float = threshold(10, "steps in a row; a scale that is halved at each falls by 2^10 in them")
    recovered: float = threshold(10, "finite steps in a row: what comes after them is judged by itself")

    outlier: float = threshold(
        2.0**16, "times the largest input of all samples before: no batch of sound data is so far off"
    )

    # Gradients that overflow under a loss scale are the scaler's way to find the scale: those steps are skipped, and
    # are no alarm unless they go on and on, or the scale stays where it is. Activations that hold -Inf and no NaN are
    # masked attention scores, and no alarm. What a scaler skips as an overflow is none if it comes again at scales that
    # leave all values around it far below the top.
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield one finding; it names the first place of the episode that matters."""
        whole = _Broken.of(view)
        if not len(whole.steps):
            return
        too_high = self._too_high(view)
        room = _room_above(view, np.setdiff1d(whole.gradients, whole.losses))
        broken = whole.since(self._begin(view, whole, too_high is not None, room is not None))
        losses, gradients, places = broken.losses, broken.gradients, broken.places
        of_gradients = not len(losses) and all(where in _OF_GRADIENTS for _, where, _ in places)
        too_high = too_high if of_gradients else None
        room = room if too_high is None and not len(losses) else None
        excused = view.scaled and of_gradients and too_high is room is None and not self._on_and_on(_counts(view)[1])
        steps = np.unique(np.concatenate([losses, gradients, np.array([s for s, *_ in places], dtype=np.int64)]))
        evidence = broken.counts(len(steps), int(np.count_nonzero(whole.steps < broken.begin)))
        spots: list[Spot] = []
        collection = advice = None
        if places:
            first, where, names = places[0]
            given, place = _in_words(view, places[0])
            evidence |= {"first_seen_in": place, "first_seen_at": first, **self._outlier(view, int(steps[0]))}
            spots = [Spot(name=name, since_step=first) for name in names if where not in _WITHOUT_LAYER]
            collection = {"input": "activations", "buffers": None, **_NO_COLLECTION}.get(where, where)
            advice = _of_outlier(evidence) or (
                _LOOK_AT_GIVEN.format(_OF_GIVEN[given]) if given else _OF_PLACE.get(where)
            )
        if not excused and (not places or (places[0][0] > steps[0] and room is None)):
            evidence["place"] = "not recorded: it began between samples"
            advice = _BETWEEN_SAMPLES
        since_weights = next((step for step, where, _ in places if where == "weights"), None)
        if since_weights is not None:
            evidence["weights_since"] = since_weights
            advice = f"{_BEYOND_REPAIR} {advice}" if advice else _BEYOND_REPAIR
        since, until = int(steps[0]), int(steps[-1])
        if room is not None:
            evidence |= {"cause": _UNDEFINED, "powers_of_two_free": room}
            advice = f"{_NO_SCALE_HELPS} {advice or ''}".rstrip()
        if too_high is not None:
            yield self._of_scale(too_high, spots, evidence, since, until, collection)
        elif not excused:
            yield self.finding(
                "alarm", spots, evidence, since_step=since, until_step=until, collection=collection,
                meaning=None if room is None else _FAR_BELOW.format(len(gradients), room),
                advice=advice or self._advice(steps, view.last_step),
            )  # fmt: skip
        else:
            skipped = len(view.skips.intersection(steps.tolist()))
            yield self._of_scaler(view, len(steps), skipped, spots, evidence, since, until, collection)

    # The watch has noted the largest input where it looked for the origin of NaN. The step may itself be a sample.
    def _outlier(self, view: View, since: int) -> dict[str, float]:
        """Return the evidence of an input of the step that is far above those of all samples before, if any."""
        usual = largest_input(view, before=since)
        for event in view.events:
            largest = event.details.get("largest_input")
            if event.kind == "origin" and event.step == since and isinstance(largest, int | float):
                outside = 0 < self.outlier * usual <= largest
                return {"largest_input": float(largest), "usual_input": usual} if outside else {}
        return {}

    def _begin(self, view: View, broken: "_Broken", too_high: bool, undefined: bool) -> int:
        """First step of the episode to report. Overflows met by a scaler are none, unless they go on and on."""
        scaled, last, (steps, counts) = view.scaled, view.last_step, _counts(view)
        on_and_on = self._on_and_on(counts) + (find_spans(counts > 0, self.fixed)[-1:] if too_high else [])
        spans: list[Span] = [(steps[[a]], steps[[b]]) for a, b in on_and_on]
        # What is undefined gave NaN at higher scales, too. The first steps on end are the search for the scale.
        later = steps[(counts > 0) & (np.cumsum(counts == 0) > 0)] if undefined else steps[:0]
        spans.append((later, later))
        spans += [reaching(loss[0], ~np.isfinite(loss[1]), last) for loss in view.losses.values()]
        if not scaled:
            spans.append(reaching(steps, counts > 0, last))
        traced = np.array([s for s, where, _ in broken.traced if not (scaled and where in _OF_GRADIENTS)], dtype=int)
        spans.append((traced, traced))
        known = np.union1d(broken.losses, broken.gradients)
        for samples in broken.samples:
            at, bad = samples.cells.steps, samples.at_any_layer
            if scaled and samples.collection in _OF_GRADIENTS:
                continue
            # Where loss and gradients are finite, only the next sample can show that this is over.
            is_weights = samples.collection == "weights"
            begins, ends = reaching(at, bad, last)
            spans.append((begins, np.where(is_weights | ~np.isin(begins, known), ends, begins)))
            # The step that broke the weights may show in them a sample later. A scaler has not skipped it.
            for place in np.flatnonzero(bad[1:] & ~bad[:-1]).tolist() if is_weights else ():
                between = known[(known >= at[place]) & (known < at[place + 1])].tolist()
                applied = np.array([s for s in between if s not in view.skips][:1], dtype=int)
                spans.append((applied, np.full(len(applied), at[place + 1])))
        begin = first_of_deciding(spans, last, self.recovered)
        if begin is None:
            return int(broken.steps[0])
        # The run has not recovered from what it met at the step before.
        place = int(np.searchsorted(broken.steps, begin))
        while place and broken.steps[place - 1] == broken.steps[place] - 1:
            place -= 1
        return int(broken.steps[place])

    def _of_scale(
        self, scale: float, spots: list[Spot], evidence: dict[str, float | int | str], since: int, until: int,
        collection: str | None,
    ) -> Finding:  # fmt: skip
        """Return the alarm on a scale that is fixed too high."""
        below = 2.0 ** math.floor(math.log2(scale))
        return self.finding(
            "alarm", spots, {**evidence, "cause": _TOO_HIGH, "scale": scale}, since_step=since, until_step=until,
            collection=collection, actions=("lower_scale",),
            meaning="The loss scale is too high and stays there: gradients overflow, and steps are skipped.",
            advice=f"Lower the loss scale below {power(below)}, by powers of two until no step is skipped. Or use "
            "a scaler that does so: DynamicScaler, or GradScaler with backoff_factor=0.5. "
            "If that does not help, plimsoll.locate finds the operation.",
        )  # fmt: skip

    def _of_scaler(
        self, view: View, count: int, skipped: int, spots: list[Spot], evidence: dict[str, float | int | str],
        since: int, until: int, collection: str | None,
    ) -> Finding:  # fmt: skip
        """Return the note on overflows by which a scaler finds its scale."""
        retry = "The loop repeats such batches already, and each try is a step of the record."
        retry = retry if view.repeats_batches else "A closure passed to step() retries such batches."
        who = "them" if skipped == count else f"{skipped:,} of them"
        return self.finding(
            "info", spots, {**evidence, "skipped": skipped}, since_step=since, until_step=until, collection=collection,
            actions=(),
            meaning=f"The loss scale was too high at these steps; the scaler skipped {who}."
            if skipped
            else "Gradients overflowed under the loss scale at these steps, and no skipped step is recorded.",
            advice=f"No action is needed if it is rare. {retry}"
            if skipped
            else "Look whether the script replaces such values (nan_to_num) or skips such steps by itself: a scaler "
            "that finds none does not lower its scale.",
        )  # fmt: skip

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the cause, or the first place, or the steps that were skipped."""
        finding = context.finding
        if finding.evidence.get("cause") == _TOO_HIGH:
            return Phrase(
                what=f"the loss scale ({power(context.number('scale'))}) is too high, and gradients have overflowed "
                f"{context.since}",
                effect=f"at {context.number('steps_with_gradients'):,.0f} steps",
                remedy="lower the loss scale or use a DynamicScaler",
            )
        if finding.evidence.get("cause") == _UNDEFINED and not finding.where:
            broken = counted(int(context.number("steps_with_gradients")), "step")
            return Phrase(
                what=f"gradients contained NaN or Inf at {broken} {context.since}",
                effect="and nothing around these steps is near an overflow",
                remedy="locate() finds the operation that gives NaN",
            )
        if "largest_input" in finding.evidence:
            largest, usual = (number(context.number(name)) for name in ("largest_input", "usual_input"))
            return Phrase(
                what=f"an input of {largest} (at samples before {usual} at most) brought NaN or Inf {context.at}",
                remedy=_check_data(context),
            )
        if finding.where:
            if str(finding.evidence.get("first_seen_in")).startswith("input "):
                return Phrase(
                    what=f"the batch of step {finding.since_step:,} contained NaN or Inf already ({context.layer})",
                    remedy=_check_data(context),
                )
            weights = finding.collection == "weights"
            return Phrase(
                what=f"{context.tensors} of {context.layer} contained NaN or Inf {context.at}",
                remedy="restore the last checkpoint" if weights else "locate() finds the operation",
            )
        seen = str(finding.evidence.get("first_seen_in", ""))
        if seen.startswith("the compiled code"):
            return Phrase(
                what=f"NaN or Inf began in {seen} {context.at}",
                remedy="locate() runs it eagerly and finds the operation",
            )
        if seen in _OF_GIVEN.values():
            return Phrase(what=f"{seen} contained NaN or Inf {context.at}", remedy=_check_data(context))
        if context.number("steps_with_loss") > 0:
            lasts = finding.until_step >= context.view.last_step
            return Phrase(
                what=f"the loss has been NaN or Inf {context.since}"
                if lasts
                else f"the loss was NaN or Inf {context.at}",
                remedy="restore the last checkpoint before it; locate() finds the operation",
            )
        broken = int(context.number("steps_with_gradients"))
        steps, numbers = context.view.scalar("nonfinite")
        steps = steps[(numbers > 0) & (steps >= finding.since_step) & (steps <= finding.until_step)]
        all_skipped = len(steps) > 0 and context.view.skips.issuperset(steps.tolist())
        return Phrase(
            what=f"gradients overflowed at {counted(broken, 'step')} {context.since}",
            effect="and each was skipped" if all_skipped else "",
            remedy="lower the scale or the learning rate, or use BF16",
        )

    def is_fatal(self, finding: Finding, last_step: int) -> bool:
        """Return whether the weights are lost, or the loss is at the end."""
        lasts = finding.until_step >= last_step
        return finding.collection == "weights" or (lasts and bool(finding.evidence.get("steps_with_loss")))

    def consequence(self, finding: Finding, last_step: int) -> str:  # noqa: ARG002
        """Return since when, whether it is fatal or not."""
        return f"and NaN or Inf came at step {finding.since_step:,}"

    def _advice(self, steps: Ints, last_step: int) -> str:
        """Return what to do; nothing is left to skip to where all batches are alike."""
        following = int(last_step - steps[0] + 1)
        if following < self.fixed or len(steps) < following / 2:
            return self.advice
        return self.advice.replace(
            _SKIP, f"Skipping helps little: {len(steps):,} of the {following:,} steps since are so."
        )

    def _too_high(self, view: View) -> float | None:
        """Return the loss scale that overflows to the end and hardly falls."""
        steps, values = _counts(view)
        spans = find_spans(values > 0, self.fixed)
        if not view.scaled or not spans or spans[-1][1] != len(steps) - 1:
            return None
        scales = view.scale_at(steps[-int(self.fixed) :])
        now = float(scales[-1])
        stays = now > 1 and bool((np.diff(scales) <= 0).all()) and float(scales[0]) < _FALL * now
        return now if stays and _overflow_first(view, int(steps[spans[-1][0]])) else None

    # A scaler that begins far too high, over gradients of a large loss, needs more steps to come down. It has found its
    # scale if finite steps follow those with which the run begins.
    def _on_and_on(self, counts: Floats) -> list[tuple[int, int]]:
        """Return the places of non-finite steps that go on for longer than a search for the scale."""
        spans = find_spans(counts > 0, self.skips)
        found = spans and spans[0][0] == 0 and not counts[spans[0][1] + 1 :][: int(self.recovered)].any()
        return spans[1:] if found and len(counts) > spans[0][1] + self.recovered else spans


def _check_data(context: FindingContext) -> str:
    """Return the remedy where the data is to blame; a step that a scaler skipped left the weights as they were."""
    skipped = context.finding.since_step in context.view.skips
    return "check the data of that step" + ("" if skipped else ", and restore the last checkpoint before it")


def _of_outlier(evidence: Mapping[str, float | int | str]) -> str:
    """Return what to do about an input that is far above the others, "" if there is none."""
    if "largest_input" not in evidence:
        return ""
    largest, usual = (number(float(evidence[name])) for name in ("largest_input", "usual_input"))
    return (
        f"Look at the data: the batch of that step has an input of {largest}, and at the samples before none is above "
        f"{usual}."
    )


def _counts(view: View) -> tuple[Ints, Floats]:
    """Return the number of non-finite gradient values by step, 0 where unknown."""
    steps, values = view.scalar("nonfinite")
    if not len(steps):
        return steps, values
    every: Ints = np.arange(int(steps[0]), int(steps[-1]) + 1, dtype=np.int64)
    counts = np.zeros(len(every))
    counts[steps - steps[0]] = values
    return every, counts


def _bad(scalar: tuple[Ints, Floats], test: Callable[[Floats], Mask]) -> Ints:
    steps, values = scalar
    return steps[test(values)]


@dataclass(frozen=True, slots=True)
class _Samples:
    """A collection with non-finite values, and where and when it has them."""

    collection: str
    cells: Cells
    bad: Mask

    @property
    def at_any_layer(self) -> Mask:
        return np.asarray(self.bad.any(axis=0))

    def first_since(self, begin: int) -> Iterator[_Place]:
        """Yield the step, collection and layers of the first from a step on, if there is one."""
        for place in np.flatnonzero(self.at_any_layer & (self.cells.steps >= begin)).tolist()[:1]:
            layers = np.flatnonzero(self.bad[:, place]).tolist()
            ordered = layers[::-1] if self.collection == "gradients" else layers
            yield int(self.cells.steps[place]), self.collection, [self.cells.names[i] for i in ordered]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Broken:
    """All that is not finite in a record."""

    losses: Ints
    gradients: Ints
    traced: Sequence[_Place]
    samples: Sequence[_Samples]
    begin: int = 0

    @classmethod
    def of(cls, view: View) -> "_Broken":
        losses = np.unique(np.concatenate([_bad(loss, lambda v: ~np.isfinite(v)) for loss in view.losses.values()]))
        gradients = _bad(view.scalar("nonfinite"), lambda values: values > 0)
        every = ((name, cells) for name in _ORDER if (cells := view.cells(name)) is not None)
        samples = [_Samples(name, cells, _nonfinite(cells)) for name, cells in every]
        samples = [each for each in samples if each.bad.any()]
        traced = [settled for place in _traced(view) if (settled := _settled(place, view)) is not None]
        return cls(losses=losses, gradients=gradients, traced=traced, samples=samples)

    @property
    def steps(self) -> Ints:
        sampled = [each.cells.steps[each.at_any_layer] for each in self.samples]
        traced = np.array([step for step, *_ in self.traced], dtype=np.int64)
        return np.unique(np.concatenate([self.losses, self.gradients, traced, *sampled]))

    @property
    def places(self) -> list[_Place]:
        """The traced places and each collection's first one, the earliest first."""
        sampled = sorted((place for each in self.samples for place in each.first_since(self.begin)), key=_step_of)
        return sorted([*self.traced, *sampled], key=_step_of)

    def since(self, begin: int) -> "_Broken":
        return _Broken(
            losses=self.losses[self.losses >= begin],
            gradients=self.gradients[self.gradients >= begin],
            traced=[place for place in self.traced if place[0] >= begin],
            samples=self.samples,
            begin=begin,
        )

    def counts(self, steps: int, before: int) -> dict[str, float | int | str]:
        """Return the evidence on how many steps are broken."""
        evidence: dict[str, float | int | str] = {
            "steps": steps,
            "steps_with_loss": len(self.losses),
            "steps_with_gradients": len(self.gradients),
        }
        if len(self.losses) and len(self.gradients):
            evidence["broke_first"] = "loss" if self.losses[0] <= self.gradients[0] else "gradients"
        return evidence | ({"steps_before": before} if before else {})


def _step_of(place: _Place) -> int:
    return place[0]


def _room_above(view: View, broken: Ints) -> float | None:
    """Return how far below overflow a scaler has met NaN or Inf, in powers of two.

    None where that is not known of `_LEAST` steps with sound samples between them, or less than `_ROOM`. A step is
    judged by the largest values of the samples before and after it, at its own loss scale.
    """
    if not view.scaled or len(broken) < _LEAST:
        return None
    room, sound = np.full(len(broken), np.inf), np.zeros(0, dtype=np.int64)
    for collection in WITH_LOSS_SCALE:
        narrow = view.narrow(collection)
        if narrow is None:
            continue
        cells = narrow.cells
        largest = cells.column("absmax") / cells.scale / cells.by_format(lambda fmt: fmt.max)
        at = np.full(len(cells.steps), -np.inf)  # of each sample, the largest value as a part of its format's top
        np.maximum.at(at, cells.at, np.where(largest > 0, np.log2(np.where(largest > 0, largest, 1.0)), -np.inf))
        known = np.isfinite(at) & (np.nansum(cells.nonfinite, axis=0) == 0) & ~np.isin(cells.steps, broken)
        steps, at = cells.steps[known], at[known]
        if not len(steps):
            continue
        following = np.searchsorted(steps, broken)
        highest = np.maximum(at[np.maximum(following - 1, 0)], at[np.minimum(following, len(steps) - 1)])
        room = np.minimum(room, -(highest + np.log2(view.scale_at(broken))))
        sound = np.union1d(sound, steps)
    far = np.isfinite(room) & (room >= _ROOM)
    between = np.unique(np.searchsorted(sound, broken)[far])  # how many sound samples came before each
    return math.floor(room[far].min()) if len(between) >= _LEAST else None


def _overflow_first(view: View, since: int) -> bool:
    """Return whether FP16's overflow broke the gradients at each sample from a step."""
    cells = view.cells("activation_gradients")
    cells = view.cells("gradients") if cells is None else cells
    if cells is None:
        return False
    bad, nans, absmax = _nonfinite(cells), cells.total_of("nans"), cells.highest(cells.column("absmax"))
    tops = cells.highest(cells.by_format(lambda fmt: fmt.max))
    seen = [place for place in np.flatnonzero(bad.any(axis=0)).tolist() if cells.steps[place] >= since]
    for place in seen:
        layers = np.flatnonzero(bad[:, place]).tolist()
        first = layers[-1] if cells.collection == "gradients" else layers[0]
        top, finite = float(tops[first, place]), float(absmax[first, place])
        # What overflows becomes Inf, and NaN only where an operation follows. An operation that is undefined at any
        # scale gives NaN at once, or an Inf among values that are far from the top of the format. A scale that is
        # itself above that top makes the gradient of a 16-bit loss Inf, and so NaN or Inf of every value at the model's
        # output.
        beyond = math.isnan(finite) and float(view.scale_at(cells.steps[[place]])[0]) > top
        if (nans[first, place] > 0 and not beyond) or top >= _WIDE or 0 < finite < top * _NEAR:
            return False
    return bool(seen)


def _in_words(view: View, place: _Place) -> tuple[str, str]:
    """Return which constant of the loss was broken, "" for none, and a place as text."""
    step, where, names = place
    events = [event for event in view.events if event.kind == "origin" and event.step == step]
    given = next((str(name) for e in events if (name := e.details.get("given")) in _OF_GIVEN), "")
    if given and where in ("targets", "loss"):
        return given, _OF_GIVEN[given]
    if where == "compiled":
        layers = f" (layer {names[0]})" if len(names) == 1 else f" (layers {names[0]} to {names[-1]})" if names else ""
        return "", f"the compiled code{layers}"
    return "", _of_loss(names) if where == "loss" else " ".join([where, *names[:1]])


def _of_loss(names: list[str]) -> str:
    """Return where a loss broke although all outputs that were seen are finite: some may not have been."""
    return f"the loss or what follows {names[0]}" if names else "the loss, of outputs that were finite"


def _traced(view: View) -> list[_Place]:
    """Return the places that the watch has traced (`watch.steps.nonfinite_origin`)."""
    traced: list[_Place] = []
    for event in view.events:
        names = event.details.get("names")
        if event.kind == "origin" and isinstance(names, list):
            traced.append((event.step, str(event.details.get("where")), [str(n) for n in cast("list[object]", names)]))
    return traced


# The watch infers the place from what the graph has kept. Where the step was sampled, the record knows better.
def _settled(place: _Place, view: View) -> _Place | None:
    """Return a traced place; the loss if its layer is recorded as finite; None if another layer is not."""
    step, where, names = place
    cells = view.cells("activations") if where in ("activations", "compiled") else None
    if cells is None or step not in cells.steps:
        return place
    at = int(np.searchsorted(cells.steps, step))
    recorded, broken = cells.recorded[:, at], _nonfinite(cells)[:, at]
    known = [cells.names.index(name) for name in names if name in cells.names]
    if where == "activations" and (not known or broken[known].any() or not recorded[known].any()):
        return place
    if broken.any():
        return None
    return (step, "loss", []) if where == "activations" or recorded.any() else place


def _nonfinite(cells: Cells) -> Mask:
    """The cells with non-finite values, those of masks left out."""
    nans, above = cells.total_of("nans"), cells.total_of("pos_infs")
    masked = cells.collection == "activations"
    return (nans > 0) | (above > 0) | ((cells.total_of("neg_infs") > 0) & (not masked))
