"""The loss: spikes, whether it comes back, and what goes before them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from plimsoll.diagnosis._cells import Cells, Floats
from plimsoll.diagnosis._finding import Finding
from plimsoll.diagnosis._rule import Rule, last_of, spells, threshold, worst
from plimsoll.diagnosis._view import View

_PIECE = 1 << 14  # losses whose windows are sorted at a time


@dataclass(frozen=True, kw_only=True)
class LossSpike(Rule):
    """A loss far above its recent median; an alarm where it does not come back."""

    id = "loss-spike"
    says = "the loss rises far above its recent median; an alarm if it stays there"
    meaning = "Some update did damage."
    advice = (
        "If it comes back, clip gradients or lower the learning rate before it no longer does. If not: go back to the "
        "checkpoint before the spike, and leave out its batches."
    )
    actions = ("rollback", "skip")
    figure = "loss_and_scale"

    deviations: float = threshold(10, "median absolute deviations, as the flight recorder has it")
    rise: float = threshold(0.5, "and so much of the median itself")
    window: float = threshold(50, "steps whose median it is held against")
    least: float = threshold(20, "steps before a loss can be called a spike")
    lasting: float = threshold(20, "steps on end above that level: it has not come back")

    def findings(self, view: View) -> Iterator[Finding]:
        """One, of the recorded loss."""
        steps, loss = view.scalar("loss")
        steps, loss = steps[np.isfinite(loss)], loss[np.isfinite(loss)]
        level = self._level(loss)
        spikes = np.flatnonzero(loss > level)
        if not len(spikes):
            return
        diverged = self._diverged(loss, level, spikes)
        first = int(spikes[0]) if diverged is None else diverged
        height = float((loss[spikes] / np.maximum(np.abs(level[spikes]), 1e-300)).max())
        usual = float(np.median(loss[max(0, first - int(self.window)) : first]))
        evidence = {"spikes": len(spikes), "loss": float(loss[first]), "usual": usual, "level": float(level[first]),
                    "highest": height}  # fmt: skip
        since = int(steps[first])
        if diverged is None:
            until = int(steps[spikes[-1]])
            yield self.finding("warning", (), evidence, since_step=since, until_step=until)
            return
        above = int(np.flatnonzero(loss > level[first])[-1])
        meaning = "The loss rose and has not come back: the run diverges."
        if above < len(loss) - 1:
            meaning = f"The loss rose and stayed there for {int(self.lasting)} steps or more before it came back."
        yield self.finding(
            "alarm", (), evidence, since_step=since, until_step=int(steps[above]), meaning=meaning
        )  # fmt: skip

    def _level(self, loss: Floats) -> Floats:
        """Above which a loss is a spike, from those before it; Inf where there are too few."""
        window, least = int(self.window), int(self.least)
        level = np.full(len(loss), np.inf)
        if len(loss) <= least:
            return level
        padded = np.concatenate([np.full(window - least, np.nan), loss[:-1]])
        windows = sliding_window_view(padded, window)
        for start in range(0, len(windows), _PIECE):
            piece = windows[start : start + _PIECE]
            median = np.nanmedian(piece, axis=1)
            deviation = np.nanmedian(np.abs(piece - median[:, None]), axis=1)
            limit = median + np.maximum(self.deviations * deviation, self.rise * np.abs(median))
            level[least + start : least + start + len(piece)] = limit
        return level

    def _diverged(self, loss: Floats, level: Floats, spikes: NDArray[np.intp]) -> int | None:
        """The first spike after which the loss stays above the level of before it."""
        lasting, done = int(self.lasting), -1
        for spike in spikes.tolist():
            if spike <= done:
                continue
            after = loss[spike : spike + lasting] > level[spike]
            if len(after) == lasting and after.all():
                return spike
            done = spike + int(np.argmin(after)) if not after.all() else spike
        return None


@dataclass(frozen=True, kw_only=True)
class SpikeForerunner(Rule):
    """What goes before a loss spike: an update far above the usual, or a gradient that Adam's memory lags behind.

    After a spell of small gradients the second moment is small, and the first large gradient is divided by its root:
    the update is far above the usual, and the loss follows (T8).
    """

    id = "spike-forerunner"
    says = "an update, or a gradient over Adam's second moment, is far above the usual: a loss spike may follow"
    meaning = "These weights moved, or are about to move, many times as far as they usually do."
    advice = "Clip gradients or updates; a smaller beta2 (0.95) follows changes sooner; check the batches there."
    actions = ("skip", "clamp")
    figure = "updates"

    jump: float = threshold(8, "times the median of the last samples: three binades")
    lag: float = threshold(20, "squared gradient over second moment, which is 1 in the mean")
    window: float = threshold(20, "samples whose median it is held against")
    least: float = threshold(5, "samples before anything is usual")

    def findings(self, view: View) -> Iterator[Finding]:
        """One of the updates, one of the gradients."""
        updates = view.cells("updates")
        if updates is not None:
            with np.errstate(all="ignore"):
                ratio = updates.norm / np.sqrt(updates.total(updates.column("weight_norm") ** 2))
                times = ratio / self._usual(ratio)
            yield from self._told(updates, times, self.jump, "times_the_usual_update")
        gradients, optimizer = view.cells("gradients"), view.cells("optimizer")
        if gradients is not None and optimizer is not None:
            yield from self._told(gradients, _lags(gradients, optimizer), self.lag, "squared_gradient_over_moment")

    def _usual(self, ratio: Floats) -> Floats:
        """The median of the last samples before each; NaN where there are too few."""
        window = int(self.window)
        padded = np.concatenate([np.full((len(ratio), window), np.nan), ratio[:, :-1]], axis=1)
        result = np.full(ratio.shape, np.nan)
        for layer in range(len(ratio)):
            windows = sliding_window_view(padded[layer], window)
            enough = np.count_nonzero(~np.isnan(windows), axis=1) >= self.least
            if enough.any():
                result[layer, : len(windows)][enough] = np.nanmedian(windows[enough], axis=1)
        return result

    def _told(self, cells: Cells, times: Floats, limit: float, what: str) -> Iterator[Finding]:
        found = spells(np.nan_to_num(times, nan=0.0) > limit, ~np.isnan(times), 1)
        if found:
            spots = worst(cells, found, times)
            evidence = {"worst": spots[0].name, what: spots[0].value, "layers": len(spots)}
            yield self.finding(
                "warning", spots, evidence, until_step=last_of(cells, found), collection=cells.collection
            )


def _lags(gradients: Cells, optimizer: Cells) -> Floats:
    """Of each gradient, the sum of squares over that of Adam's second moments, corrected for their start at zero."""
    place = {name: i for i, name in enumerate(optimizer.names)}
    moments = [place.get(f"{name}:exp_avg_sq", -1) for name in gradients.names]
    common, mine, theirs = np.intersect1d(gradients.steps, optimizer.steps, return_indices=True)
    result = np.full(gradients.shape, np.nan)
    has = np.flatnonzero(np.array(moments) >= 0)
    if not len(has) or not len(common):
        return result
    memory = 1 - 0.999 ** (common + 1)  # beta2's default: with a smaller one this errs on the quiet side
    sums = optimizer.total_of("sum")[np.array(moments)[has]][:, theirs] / memory
    with np.errstate(all="ignore"):
        result[np.ix_(has, mine)] = np.where(sums > 0, gradients.norm[has][:, mine] ** 2 / sums, np.nan)
    return result
