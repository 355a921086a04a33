"""Checks of the operations behind a loss in the first backwards, and of its targets.

- A softmax or sigmoid before a loss that applies one itself.
- Losses that are divided by the number of micro-batches twice, scaled twice, or of which only a part carries the loss
  scale, and losses that are added up in 16 bits.
- Batch norms over two values, and those that evaluate by the last batch alone.
- Values that are kept for the backward in 8 bits without a scale.
- Indices that were rounded to 16 bits.
- Gradients that a loss makes in its forward in FP16, before the loss scale, where they are zero.
- Casts of weights that autocast keeps from before the last step.
- Scores that are cosines times a small constant.
- A softmax over the rows of a batch, outputs that meet all targets, the number of classes, a first loss far off.
- Scores where logarithms are wanted, and targets that the function before the loss cannot put out.
- Targets that are the model's own input tokens, that its attention sees at the next place, or that are mostly padding.
- Attention that reads padding alone.
- Losses that only pull results of the same weights together.
- Batches whose targets are of one class, and those of other batches of another.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number, resolved
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.text import percent
from plimsoll.watch.hooks import attention_graph, autograd_graph
from plimsoll.watch.steps.wiring.checks import REPEATS, Fact, FollowedOptimizer, Training, TrainingCheck, listed
from plimsoll.watch.steps.wiring.modes import norms_of_last_batch

_SOME = 4096  # targets of a batch
_ROUNDING = 1e-3  # by which a number may pass a bound
_OUTSIDE = 0.05  # of the targets of a batch: fewer may be outliers
_FAR = 4.0  # times the loss of guessing, with which new weights of a usual size begin
_NO_BETTER = 0.9  # of the loss of guessing
_FEWEST = 8  # of a batch that can show anything: so many of one class are no chance
_TOKENS = 32
_TENSORS = 64  # kept in 8 bits
_MAGNITUDE = 0x7F  # bits of an 8-bit number without its sign
_ALMOST_ALL = 0.9  # of a batch
_SAMPLES = 10  # at least
_ROWS = 4  # of a batch that have padding
_HALF = 0.5
_OTHERS = 0.2  # of the samples of one class are of another class than most: the class changes
_LOOKS = 3  # backwards behind whose loss it is looked: the way to a loss rarely changes
_PAIR = 2  # values of which a norm leaves 1 and -1, whatever they are
_QUANTUM = 2.0**-24  # FP16's smallest number; up to its smallest normal one values are multiples of it
_NORMAL = 1024  # times that
_FEW, _SOME_DIGITS = 8, 64  # times that: next to what is lost; values of at most six digits
_LOST = 0.25  # of the gradients
_INDICES = 32  # that a 16-bit format may hold or not


class LossGraph(TrainingCheck):
    """The operations behind the losses of a training."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._targets = Targets(training)
        self._looks = _LOOKS
        self._squashed = ""  # what the loss of the backward that runs applies twice
        self._divided = 0  # what a loss was divided by twice
        self._pairs: list[set[str]] = []  # the batch norms over two values, of each look
        self._flushed: Counter[str] = Counter()  # looks at which what is kept in 8 bits had become zero
        self._casts: dict[tuple[int, int], int] = {}  # versions of the weights that casts were made of
        self._pulled: list[set[int]] = []  # the weights behind both sides of all terms, of each look
        self._root = -1  # place of the last loss among the operations

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        training = self.training
        self._squashed = ""
        is_first = training.backwards_since_step == 1
        first_of_step = is_first and training.steps <= REPEATS
        sampled = is_first and self.session.sample is not None
        if not training.optimizers or not (self._looks or first_of_step or sampled):
            return
        given: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        roots = [root for root in given if isinstance(root, Tensor)]
        is_loss = len(roots) == 1 and roots[0].numel() == 1
        if sampled and is_loss:
            self._targets.look_at_classes(roots[0])
        if self._looks:
            self._looks -= 1
            pulled = autograd_graph.only_pulls(roots[0], training.scale()) if is_loss else []
            self._pulled.append({id(weight) for weight in pulled})
            self._squashed = autograd_graph.squashed_twice(roots)
            if is_loss:
                self._look_behind(roots[0])
        if first_of_step and is_loss and roots[0].grad_fn is not None:
            self._look_at_casts(roots[0])

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self._squashed and any(followed.reached for followed in self.training.optimizers.values()):
            message = f"the loss applies a {self._squashed} to the results of a {self._squashed}"
            self.facts.record("squashed twice", message, function=self._squashed)

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None:
        """A loss was scaled."""
        if autograd_graph.is_multiple_of_scaled(loss, scale):
            self.facts.record_if(
                "scaled twice", "a loss that was scaled already is scaled again", self.training.loss_is_scaled()
            )

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called."""
        self._targets.step_begins(optimizer)
        if self._divided and self._divided == self.training.backwards_since_step:
            message = f"the loss is divided by {self._divided} twice, the number of micro-batches of a step"
            self.facts.record("divided twice", message, by=self._divided)
        if len(self._pulled) == _LOOKS and all(self._pulled):
            names, owned = self.training.names(), self.training.owned()
            common = [key for key in owned.intersection(*self._pulled) if key in names]
            self._pulled = []
            if common:
                message = "the loss only pulls results of the same weights together, and nothing holds them apart"
                self.facts.record("only pulls", message, parameters=sorted(names[key] for key in common))

    def _look_behind(self, loss: Tensor) -> None:
        self._divided = autograd_graph.divided_twice(loss)
        self.training.divisors = autograd_graph.divided_by(loss)
        count, dtype = autograd_graph.length_of_sum(loss)
        if dtype in SIXTEEN_BIT and count >= 2 ** (FORMATS[dtype].mantissa_bits + 1):
            fmt = FORMATS[dtype].name
            message = f"the loss adds {count:,} numbers one by one in {fmt}"
            self.facts.record("loss added up", message, terms=count, format=fmt)
        self._look_at_8_bits(loss)
        names, scale = self.training.names(), self.training.scale()
        self._look_at_batch_norms(loss, names)
        is_first = self.training.backwards == 1 and not self.facts.has("scaled twice")  # else the loss is not known
        self._targets.look_behind(loss, scale, is_first=is_first)
        if scale is not None:
            leaves = autograd_graph.unscaled_leaves(loss, scale)
            if apart := [names[id(leaf)] for leaf in leaves if id(leaf) in names]:
                message = f"only a part of the loss carries the loss scale: {listed(apart)} get gradients without it"
                self.facts.record_if("part unscaled", message, self.training.loss_is_scaled(), parameters=apart)
        for function, kept in autograd_graph.gradients_kept_in_fp16(loss):
            self._look_at_kept_gradients(function, kept)
        for table, indices in autograd_graph.rows_looked_up(loss):
            if id(table) in names:
                self._look_at_indices(names[id(table)], indices.detach())

    # A scale brings the largest value near the format's largest. Where all are below the smallest normal number there
    # was none, and a softmax that no longer sums up to 1 has lost what it is made of. Other tensors may be all zero.
    def _look_at_8_bits(self, loss: Tensor) -> None:
        """Look for tensors that are kept for the backward in 8 bits, and most of whose values became zero there."""
        for place, (operation, kept, dim) in enumerate(itertools.islice(autograd_graph.kept_in_8_bits(loss), _TENSORS)):
            if not kept.numel():
                continue
            codes = kept.view(torch.uint8) & _MAGNITUDE
            sums = kept[:1].float().sum(dim=dim).mean() if dim else torch.ones((), device=kept.device)
            numbers = DeviceValue(torch.stack([codes.amax().float(), (codes == 0).float().mean(), sums]))
            fmt = FORMATS[kept.dtype]

            def read(
                numbers: DeviceValue = numbers,
                key: str = f"{operation} {place}",
                fmt: Any = fmt,
                operation: str = operation,
            ) -> list[Fact]:
                largest, zeros, sums = cast("list[float]", numbers.tensor().tolist())
                at_bottom = 0 < largest < 2**fmt.mantissa_bits and zeros >= _HALF  # codes of subnormal numbers
                self._flushed[key] += at_bottom or sums < _HALF
                if self._flushed[key] < _LOOKS:
                    return []
                message = f"{percent(zeros)} of what {operation} keeps for the backward in {fmt.name.upper()} is zero"
                return [Fact("kept in 8 bits", message, {"operation": operation, "format": fmt.name, "zeros": zeros})]

            self.facts.record_from(read, once=True)

    # The last batch of an epoch may be as small: several on end are no chance.
    def _look_at_batch_norms(self, loss: Tensor, names: Mapping[int, str]) -> None:
        few = (weight for weight, values in autograd_graph.values_normalised(loss) if values == _PAIR)
        self._pairs.append({names[id(weight)].removesuffix(".weight") for weight in few if id(weight) in names})
        pairs = sorted(self._pairs[0].intersection(*self._pairs))
        if len(self._pairs) == _LOOKS and pairs:
            message = f"{listed(pairs)} normalise two values of a channel"
            self.facts.record("norm of two values", message, modules=pairs)
        if last := norms_of_last_batch(self.training.model()):
            self.facts.record(
                "norm of the last batch", f"{listed(last)} evaluate by the last batch alone", modules=last
            )

    # Autocast casts a weight once, and keeps the cast until its outermost context is left. The same cast in the graph
    # of a later step, of a weight that was written since, is one that nobody has made again.
    def _look_at_casts(self, loss: Tensor) -> None:
        stale = list[str]()
        names = self.training.names()
        # Operations are counted by thread: a forward on a thread of its own begins at 0 again, and shows nothing.
        before, self._root = self._root, autograd_graph.position(loss.grad_fn)
        if self._root <= before:
            return
        for leaf, place in autograd_graph.casts_of_leaves(loss):
            version = self._casts.setdefault((id(leaf), place), leaf._version)  # noqa: SLF001  (public in all but name)
            if leaf._version > version and id(leaf) in names:  # noqa: SLF001  (likewise)
                stale.append(names[id(leaf)])
        if stale:
            message = f"the forward uses casts of {listed(stale)} from before the last step: autocast has kept them"
            self.facts.record("stale casts", message, parameters=stale)

    # Rows of padding are zero as a whole, and left out. Other zeros lie among multiples of FP16's smallest number.
    def _look_at_kept_gradients(self, function: str, kept: Tensor) -> None:
        sizes = kept.abs()[None] if kept.dim() == 1 else kept.abs().flatten(0, -2)
        nonzero, of_rows = sizes > 0, sizes.amax(1) > 0
        least = sizes.where(nonzero, torch.full_like(sizes, torch.inf)).amin()
        size = torch.stack([least, sizes.amax()]).float() / _QUANTUM
        counts = torch.stack([nonzero.sum(), of_rows.sum() * sizes.shape[1]])
        numbers = DeviceValue(torch.cat([counts.float(), size]))

        def read() -> list[Fact]:
            left, of, lowest, highest = cast("list[float]", numbers.tensor().tolist())
            lost, narrow = 1 - left / max(of, 1.0), lowest <= _FEW or highest <= _SOME_DIGITS
            if left < _FEWEST or lost < _LOST or highest >= _NORMAL or not narrow:
                return []
            message = f"{function} makes its gradient in the forward in FP16, where most of it is zero"
            return [Fact("gradient made narrow", message, {"function": function, "lost": lost, "largest": highest})]

        self.facts.record_from(read, once=True)

    # Whole numbers above 256 that BF16 holds are even, above 512 multiples of four: as many as that by chance are none.
    def _look_at_indices(self, name: str, indices: Tensor) -> None:
        for dtype in SIXTEEN_BIT:
            beyond = indices > 2 ** (FORMATS[dtype].mantissa_bits + 1)
            kept = beyond & (indices == indices.to(dtype).to(indices.dtype))
            counts = DeviceValue(torch.stack([beyond.sum(), kept.sum()]))
            fmt = FORMATS[dtype].name

            def holds(counts: DeviceValue = counts) -> bool:
                some, whole = cast("list[int]", counts.tensor().tolist())
                return some >= _INDICES and whole == some

            message = f"the indices of {name} have been rounded to {fmt}: neighbours have become the same"
            self.facts.record_if(
                "indices rounded", message, holds, key=f"{fmt} {name} {self._looks}", parameters=[name], format=fmt
            )


class Targets:
    """The losses of one training, and their targets."""

    def __init__(self, training: Training) -> None:
        self._facts = training.facts
        self._looks = 0
        self._factors: list[float] = []  # that hold cosines small, of each look
        self._error = ("", 0)  # of the last backward that was looked at, and its sign
        self._samples = 0
        self._classes: Counter[int] = Counter()  # of samples whose targets are nearly all of one class

    # Drawn at random, batches are not nearly all of one class and then of another. Where one class is frequent, it is
    # always that one; but two losses may each have their own. Nothing here waits for a device: the background thread
    # reads and counts.
    def look_at_classes(self, loss: Tensor) -> None:
        """Look whether the targets of this batch are of one class, and those of other batches of another."""
        found = list(autograd_graph.targets_of(loss))
        if len(found) != 1 or self._facts.has("one class"):
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

        self._facts.record_from(read, once=True)

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
        return [Fact("one class", message, {"batches": alike, "of": self._samples, "classes": len(self._classes)})]

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
            self._facts.record("maximised", message, error=error, optimizer=who if ascends else "")

    def look_behind(self, loss: Tensor, scale: Tensor | None, *, is_first: bool) -> None:
        """Look for a softmax over the batch, and outputs that meet each target; note the number of classes."""
        self._looks += 1
        if rows := autograd_graph.softmax_over_rows(loss):
            message = f"the loss takes a log softmax over {rows} rows, not over the classes"
            self._facts.record("softmax over rows", message, rows=rows)
        if pairs := autograd_graph.spread_outputs(loss):
            message = f"the loss takes {pairs} outputs and {pairs} targets as {pairs} x {pairs} pairs: shapes differ"
            self._facts.record("pairs", message, rows=pairs)
        self._error = autograd_graph.error_of(loss)
        self._look_at_values(loss)
        self._look_at_tokens(loss)
        self._look_at_next_tokens(loss)
        self._look_at_places_read(loss)
        self._look_at_cosines(loss)
        classes, divisor = autograd_graph.classes_of(loss, scale)
        if classes > 1:
            # Of a loss that is multiplied by hand, as one that is scaled so, guessing costs as many times as much.
            times = 1 / divisor if 0 < divisor < 1 else 1.0
            self._facts.record(
                "classes", f"the loss is a mean cross entropy of {classes} classes", classes=classes, times=times
            )
            if is_first:
                self._look_at_first_loss(loss.detach() * (divisor if scale is None else divisor / scale), classes)

    # With scores from -f to f, the likeliest of C classes has a probability of 1 / (1 + (C - 1) exp(-2 f)) at most.
    # A factor that changes from step to step may be on its way up.
    def _look_at_cosines(self, loss: Tensor) -> None:
        """Look whether the scores are cosines that a constant factor holds so small that nothing can be learned."""
        factor, classes = autograd_graph.bound_of_cosines(loss)
        self._factors.append(factor)
        if len(self._factors) < _LOOKS or len(set(self._factors)) > 1 or not factor or classes < 2:
            return
        lowest = math.log1p((classes - 1) * math.exp(-2 * factor))
        if lowest >= _NO_BETTER * math.log(classes):
            message = f"scores are cosines times {factor:.3g}: no loss of {classes} classes is below {lowest:.4g}"
            self._facts.record("cosines held small", message, factor=factor, lowest=lowest, classes=classes)

    # What is not finite shows elsewhere, and a logarithm of a probability may be above zero by a rounding.
    def _look_at_values(self, loss: Tensor) -> None:
        """Look for probabilities or scores where logarithms are wanted, and targets that no output can reach."""
        if autograd_graph.divergence_of_probabilities(loss):
            self._facts.record(
                "no logarithms", "kl_div is given probabilities, not their logarithms", function="kl_div"
            )
        for given in autograd_graph.given_for_logarithms(loss):
            if not given.numel():  # of an empty batch
                continue
            highest = number(given.detach().amax())
            message = "nll_loss is given numbers above zero, which no logarithm of a probability is"
            key = f"no logarithms {self._looks}"
            self._facts.record_if(
                "no logarithms", message, lambda highest=highest: (resolved(highest) or 0.0) > _ROUNDING, key=key,
                function="nll_loss",
            )  # fmt: skip
        for name, targets, low, high in autograd_graph.bounded_outputs(loss):
            slack = _ROUNDING * (high - low if high < math.inf else 1.0)
            some = targets.detach().reshape(-1)[:: 1 + targets.numel() // _SOME]
            share = number(((some < low - slack) | (some > high + slack)).float().mean())
            self._facts.record_if(
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

        self._facts.record_from(read)

    # A padding token follows itself. In other texts few tokens do.
    def _look_at_tokens(self, loss: Tensor) -> None:
        """Look whether the targets are the tokens that the model is given, at all places or at those of padding."""
        looked_up = [indices.detach().reshape(-1) for _, indices in autograd_graph.rows_looked_up(loss)]
        for targets, left_out in autograd_graph.targets_of(loss):
            for tokens in looked_up:
                if tokens.numel() == targets.numel() >= _TOKENS and tokens.device == targets.device:
                    self._compare(targets, tokens, left_out, attention_graph.attends_to_the_past(loss))

    def _look_at_next_tokens(self, loss: Tensor) -> None:
        """Look whether the targets are the tokens at the next places, and attention sees those."""
        for targets, left_out, tokens, share in attention_graph.next_places_seen(loss):
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

            self._facts.record_from(read, once=True)

    # Padding is a run of one token at an end, and not as long in all rows. A row that is hidden as a whole says
    # nothing, nor does one that is read as a whole, as where the scores of hidden places are finite.
    def _look_at_places_read(self, loss: Tensor) -> None:
        """Look whether attention reads the padding at an end of the rows, and hides all other tokens."""
        for tokens, read in attention_graph.places_read(loss):
            if tokens.device != read.device:
                continue
            counted = (read.any(dim=1) & ~read.all(dim=1))[:, None]
            inside, outside = read & counted, ~read & counted
            token = torch.where(inside, tokens, -1).amax()
            low, high = torch.where(outside, tokens, tokens.amax()).amin(), torch.where(outside, tokens, -1).amax()
            lengths, edges = inside.sum(dim=1), inside[:, 1:].int() - inside[:, :-1].int()
            shortest = torch.where(counted[:, 0], lengths, tokens.shape[1]).amin()
            wrong = (((tokens == token) != inside) & counted).sum()
            ends = torch.stack([(edges < 0).sum(), (edges > 0).sum()]).amin()  # 0: all runs are at the same end
            numbers = DeviceValue(
                torch.stack([token, wrong, ends, counted.sum(), outside.sum(), lengths.amax(), shortest, low, high])
            )

            def read_numbers(numbers: DeviceValue = numbers) -> list[Fact]:
                token, wrong, ends, rows, others, longest, shortest, low, high = cast(
                    "list[int]", numbers.tensor().tolist()
                )
                if wrong or ends or rows < _ROWS or others < _TOKENS or low == high or longest == shortest:
                    return []
                message = f"attention reads the places of token {token} at the ends of the rows, and hides all others"
                return [Fact("padding read", message, {"token": token, "rows": rows, "hidden": others})]

            self._facts.record_from(read_numbers, once=True)

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

        self._facts.record_from(read, once=True)
