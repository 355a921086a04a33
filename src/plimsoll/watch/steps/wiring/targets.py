"""Checks of a loss, by the graph behind it, and of its targets.

- A softmax over the rows of a batch, outputs that meet all targets, the number of classes, a first loss far off.
- Scores where logarithms are wanted, and targets that the function before the loss cannot put out.
- Targets that are the model's own input tokens, that its attention sees at the next place, or that are mostly padding.
- Batches whose targets are of one class, and those of other batches of another.
"""

import math
from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number, resolved
from plimsoll.watch.hooks import autograd_graph
from plimsoll.watch.steps.wiring.checks import Fact, Training

_SOME = 4096  # targets of a batch
_ROUNDING = 1e-3  # by which a number may pass a bound
_OUTSIDE = 0.05  # of the targets of a batch: fewer may be outliers
_FAR = 4.0  # times the loss of guessing, with which new weights of a usual size begin
_FEWEST = 8  # of a batch that can show anything: so many of one class are no chance
_TOKENS = 32
_ALMOST_ALL = 0.9  # of a batch
_SAMPLES = 10  # at least
_HALF = 0.5
_ONE_CLASS = "one class"
_OTHERS = 0.2  # of the samples of one class are of another class than most: the class changes


class Targets:
    """The losses of one training, and their targets."""

    def __init__(self, training: Training) -> None:
        self._facts = training.facts
        self._looks = 0
        self._error = ("", 0)  # of the last backward that was looked at, and its sign
        self._samples = 0
        self._classes: Counter[int] = Counter()  # of samples whose targets are nearly all of one class

    # Drawn at random, batches are not nearly all of one class and then of another. Where one class is frequent, it is
    # always that one; but two losses may each have their own. Nothing here waits for a device: the background thread
    # reads and counts.
    def look_at_classes(self, loss: Tensor) -> None:
        """Look whether the targets of this batch are of one class, and those of other batches of another."""
        found = list(autograd_graph.targets_of(loss))
        if len(found) != 1 or self._facts.has(_ONE_CLASS):
            return
        targets, left_out = found[0]
        some = targets[:: 1 + len(targets) // _SOME]
        if len(some) < _FEWEST:
            return
        middle = some[len(some) // 2]
        counts = DeviceValue(torch.stack([middle, (some == middle).sum(), (some != left_out).sum()]))

        def read() -> list[Fact]:
            label, same, counted = cast("list[int]", counts.tensor().tolist())
            return self._count(label, same / counted) if counted >= _FEWEST and label != left_out else []

        self._facts.read(read, once=True)

    def _count(self, label: int, share: float) -> list[Fact]:
        """Count a sample; return the fact once it is clear."""
        self._samples += 1
        if share >= _ALMOST_ALL:
            self._classes[label] += 1
        alike = self._classes.total()
        most = max(self._classes.values(), default=0)
        if self._samples < _SAMPLES or alike < _HALF * self._samples or alike - most < _OTHERS * alike:
            return []
        message = f"{alike} of {self._samples} sampled batches have targets of one class, and not always the same"
        return [Fact(_ONE_CLASS, message, {"batches": alike, "of": self._samples, "classes": len(self._classes)})]

    # What a backward that no step follows maximises, as for an adversarial input, is not trained.
    def step_begins(self, optimizer: Any) -> None:
        """Note an error that the optimizer's step maximises: by the sign of the loss, or by `maximize`."""
        (error, sign), self._error = self._error, ("", 0)
        ascends = any(group.get("maximize") for group in optimizer.param_groups)
        if error and (sign < 0) != ascends:
            who = type(optimizer).__name__
            message = (
                f"{who} maximises the loss, which is {error}" if ascends else f"the loss is the negative of {error}"
            )
            self._facts.say("maximised", message, error=error, optimizer=who if ascends else "")

    def look_behind(self, loss: Tensor, scale: Tensor | None, *, is_first: bool) -> None:
        """Look for a softmax over the batch, and outputs that meet each target; note the number of classes."""
        self._looks += 1
        if rows := autograd_graph.softmax_over_rows(loss):
            message = f"the loss takes a log softmax over {rows} rows, not over the classes"
            self._facts.say("softmax over rows", message, rows=rows)
        if pairs := autograd_graph.spread_outputs(loss):
            message = f"the loss takes {pairs} outputs and {pairs} targets as {pairs} x {pairs} pairs: shapes differ"
            self._facts.say("pairs", message, rows=pairs)
        self._error = autograd_graph.error_of(loss)
        self._look_at_values(loss)
        self._look_at_tokens(loss)
        self._look_at_next_tokens(loss)
        classes, divisor = autograd_graph.classes_of(loss, scale)
        if classes > 1:
            # Of a loss that is multiplied by hand, as one that is scaled so, guessing costs as many times as much.
            times = 1 / divisor if 0 < divisor < 1 else 1.0
            self._facts.say(
                "classes", f"the loss is a mean cross entropy of {classes} classes", classes=classes, times=times
            )
            if is_first:
                self._look_at_first_loss(loss.detach() * (divisor if scale is None else divisor / scale), classes)

    # What is not finite shows elsewhere, and a logarithm of a probability may be above zero by a rounding.
    def _look_at_values(self, loss: Tensor) -> None:
        """Look for probabilities or scores where logarithms are wanted, and targets that no output can reach."""
        if autograd_graph.divergence_of_probabilities(loss):
            self._facts.say("no logarithms", "kl_div is given probabilities, not their logarithms", function="kl_div")
        for given in autograd_graph.given_for_logarithms(loss):
            if not given.numel():  # of an empty batch
                continue
            highest = number(given.detach().amax())
            message = "nll_loss is given numbers above zero, which no logarithm of a probability is"
            key = f"no logarithms {self._looks}"
            self._facts.later(
                "no logarithms", message, lambda highest=highest: (resolved(highest) or 0.0) > _ROUNDING, key=key,
                function="nll_loss",
            )  # fmt: skip
        for name, targets, low, high in autograd_graph.bounded_outputs(loss):
            slack = _ROUNDING * (high - low if high < math.inf else 1.0)
            some = targets.detach().reshape(-1)[:: 1 + targets.numel() // _SOME]
            share = number(((some < low - slack) | (some > high + slack)).float().mean())
            self._facts.later(
                "out of reach", f"{name} puts out {low:g} to {high:g}, and targets are outside",
                lambda share=share: (resolved(share) or 0.0) >= _OUTSIDE, key=f"out of reach {name} {self._looks}",
                function=name, low=f"{low:g}", high=f"{high:g}",
            )  # fmt: skip

    def _look_at_first_loss(self, loss: Tensor, classes: int) -> None:
        """Record a first loss that is many times that of guessing."""
        first = number(loss)

        def read() -> list[Fact]:
            value = float(resolved(first) or 0.0)
            if not _FAR * math.log(classes) < value < math.inf:
                return []
            message = f"the first loss is {value:.4g}; guessing among {classes} classes costs {math.log(classes):.4g}"
            return [Fact("begins far off", message, {"loss": value, "classes": classes})]

        self._facts.read(read)

    # A padding token follows itself. In other texts few tokens do.
    def _look_at_tokens(self, loss: Tensor) -> None:
        """Look whether the targets are the tokens that the model is given, at all places or at those of padding."""
        looked_up = [indices.detach().reshape(-1) for _, indices in autograd_graph.rows_looked_up(loss)]
        for targets, left_out in autograd_graph.targets_of(loss):
            for tokens in looked_up:
                if tokens.numel() == targets.numel() >= _TOKENS and tokens.device == targets.device:
                    self._compare(targets, tokens, left_out, autograd_graph.attends_to_the_past(loss))

    def _look_at_next_tokens(self, loss: Tensor) -> None:
        """Look whether the targets are the tokens at the next places, and attention sees those."""
        for targets, left_out, tokens, share in autograd_graph.next_places_seen(loss):
            rows, places = tokens.shape
            if targets.device != tokens.device or targets.numel() not in (rows * places, rows * (places - 1)):
                continue
            wanted, following = targets.reshape(rows, -1)[:, : places - 1], tokens[:, 1:]
            counted = wanted != left_out
            alike, moved = counted & (wanted == following), counted & (wanted != tokens[:, :-1])
            numbers = DeviceValue(
                torch.stack([counted.sum(), alike.sum(), moved.sum(), (share > _HALF).to(alike).sum()])
            )

            def read(numbers: DeviceValue = numbers) -> list[Fact]:
                of, same, apart, is_seen = cast("list[int]", numbers.tensor().tolist())
                if of < _TOKENS or same != of or apart < _FEWEST or not is_seen:
                    return []
                return [Fact("next seen", "the targets are the tokens at the next places, which attention sees", {})]

            self._facts.read(read, once=True)

    def _compare(self, targets: Tensor, tokens: Tensor, left_out: int, causal: Tensor | None) -> None:
        counted, same, ends = targets != left_out, targets == tokens, targets[:: len(targets) - 1]
        padded = (same & counted & (targets == ends[:, None])).sum(1)  # padding is at either end
        known = torch.zeros_like(ends[0]) if causal is None else causal.to(ends)
        numbers = DeviceValue(torch.stack([counted.sum(), (same & counted).sum(), *padded, *ends, known]))

        def read() -> list[Fact]:
            of, alike, *rest, is_causal = cast("list[int]", numbers.tensor().tolist())
            padding, token = max(zip(rest[:2], rest[2:], strict=True))
            if of < _TOKENS:
                return []
            if alike == of and of - padding >= _FEWEST and is_causal:
                fact, message = "not shifted", "the targets are the tokens that the model is given, at the same places"
            elif _HALF * of <= padding < of:
                fact, message = "padding counted", f"most targets are token {token}, where the model is given it, too"
            else:
                return []
            return [Fact(fact, message, {"share": padding / of, "token": token})]

        self._facts.read(read, once=True)
