"""Facts on a training's wiring: trained parameters, and gradients between steps.

What goes wrong here leaves the numbers finite and plausible, so it is recorded as facts and not guessed from spectra:

- a model that is called with other parameters than its own;
- an optimizer that never steps, that steps without gradients, or whose rate is 0, NaN, Inf or next to nothing;
- parameters that require gradients and are in no optimizer, or in one and never get a gradient;
- gradients that are added to those of the step before, because nothing has set them to zero, or not at each step;
- gradients of a scaled loss that reach the optimizer as the backward left them;
- gradients of a scaled loss that are added to those that the scaler has unscaled already in the same step;
- gradients of micro-batches that are cleared before the next, or rounded away as they are added up in 16 bits;
- gradients that are clipped before the last micro-batch of a step is added, and clipping that gets no gradient;
- weights that are written between the steps so that the updates are undone;
- an epsilon of Adam that is zero in the FP16 of its second moments;
- weight decay that is less than half a unit in the last place of 16-bit weights;
- a softmax or sigmoid before a loss that applies one itself;
- ranks that begin with other weights, and layers whose units are copies of each other (`model_facts`);
- weights, gradients, second moments and losses that are kept in fewer digits than their dtype has (`kept_narrow`);
- losses that are divided by the number of micro-batches twice, that are scaled twice, or of which only a part carries
  the loss scale;
- a model that is trained in evaluation mode, and frozen batch norms that are not;
- norms over a single value, which are their bias whatever comes in, batch norms over two, and those that evaluate by
  the last batch alone;
- a log softmax over the rows of a batch, outputs that are paired with all targets, and the classes of a cross entropy;
- a loss of log probabilities that gets others, and targets that the function before the loss cannot reach;
- targets of one class a batch, or that are the model's own input (`targets`);
- schedules that lower a rate while it is needed, raise it past their end, or begin again too early, and added weight
  decay (`schedules`);
- casts of weights that autocast keeps from before the last step;
- the state of an optimizer that is cleared, or begun again, every few steps;
- averages of weights that rounding keeps where they are (`averages`).
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue, number, resolved
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.runs import Event, Record
from plimsoll.watch.hooks import autograd_graph, torch_hooks
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.optimizer_tensors import has_gradients, has_unscaled, innermost, parameters_of
from plimsoll.watch.parameters.updates import OWN, kind_of
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.steps.wiring.averages import Averages
from plimsoll.watch.steps.wiring.followed import FollowedGradient, FollowedOptimizer
from plimsoll.watch.steps.wiring.kept_narrow import (
    are_nearest,
    flush_of,
    rounding_of,
    share_of_zeros,
)
from plimsoll.watch.steps.wiring.schedules import Schedules
from plimsoll.watch.steps.wiring.targets import Targets
from plimsoll.watch.steps.wiring.weights import (
    ClearedStates,
    EvaluationMode,
    FirstWeights,
    FrozenNorms,
    all_parameters,
    are_undone,
    is_rounded_away,
    norms_of_last_batch,
    norms_of_one_value,
)
from plimsoll.watch.taps.compiled_taps import is_capturing

_JUDGED_STEPS = 10  # of an optimizer, after which parameters that have had no gradient are named
_PATIENCE = 200  # backwards, or steps of others, after which an optimizer that has not stepped is named
_FEWEST = 3  # backwards or steps by which a watch that closes may be judged
_REPEATS = 3  # steps on end in which gradients were carried over, or not unscaled
_SOME = 6  # steps in which they were carried over, among others in which they were not
_INDICES = 32  # that a 16-bit format may hold or not
_LOOKS = 3  # backwards behind whose loss it is looked: the way to a loss rarely changes
_PAIR = 2  # values of which a norm leaves 1 and -1, whatever they are
_ROOTED = ("exp_avg_sq", "square_avg")  # states whose root is divided by
_FP16_ZERO = 2.0**-25  # half of the smallest subnormal of FP16: this and less is rounded to zero


class Wiring(torch_hooks.TrainingEvents):
    """Listener that records the wiring, from `hooks.torch_hooks.TrainingEvents`."""

    def __init__(self, core: WatchSession, optimizers: Iterable[Any]) -> None:
        self.core = core
        self._known: weakref.WeakKeyDictionary[Any, FollowedOptimizer] = weakref.WeakKeyDictionary()
        self._foreign: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often looked at
        self._graded: set[int] = set()  # parameters that have had a gradient
        self._unowned: dict[int, str] = {}  # those that were said to be in no optimizer
        self._ungraded: dict[int, str] = {}  # and those to have no gradient
        self._backwards = 0
        self._since_step = 0  # backwards since any optimizer has stepped
        self._steps = 0  # the most of any optimizer, which may be gone when the watch closes
        self._scaler: weakref.ref[Any] | None = None
        self._scaled: weakref.ref[Tensor] | None = None  # the loss that was scaled last
        self._of_scaled = False  # the backward that runs is its
        self._squashed = ""  # what the loss of the backward that runs applies twice
        self._looks = _LOOKS
        self._divided = 0  # what a loss was divided by twice
        self._divisors: list[int] = []  # what it was divided by
        self._norms: list[int] = []  # of how many gradients each norm since the last step was taken
        self._pairs: list[set[str]] = []  # the batch norms over two values, of each look
        self._casts: dict[tuple[int, int], int] = {}  # versions of the weights that casts were made of
        self._root = -1  # place of the last loss among the operations
        self._states = ClearedStates()
        self._judged = False
        self._trainable: dict[int, weakref.ref[Tensor]] = {}  # when it was judged last
        self._due: int | None = None  # steps of an optimizer after which new parameters are judged
        self._said: set[str] = set()
        self._averages = Averages(core)
        self._first_weights = FirstWeights(core)
        self._mode = EvaluationMode(core)
        self._targets = Targets(core, self._say, self._later)
        self._frozen_norms = FrozenNorms()
        self._schedules = Schedules(core, self._say, self._names)
        known = list(optimizers)
        if known and not [o for o in known if self._meet(o) is not None]:
            names = ", ".join(type(optimizer).__name__ for optimizer in known)
            message = f"no parameter of {names} is one of the model's"
            self._say("foreign optimizer", message, optimizer=names)
        if narrow := norms_of_one_value(core.model()):
            self._say("norm of one value", f"{_listed(narrow)} normalise single values", modules=narrow)
        core.at_close.append(self._close)

    # -- the training

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward begins."""
        if self._idle():
            return
        self._backwards += 1
        self._since_step += 1
        loss = None if self._scaled is None else self._scaled()
        self._of_scaled = loss is not None and tensors is loss
        self._look_behind(tensors)
        for optimizer, known in list(self._known.items()):
            if known.was_scaled:  # no scaler's step has come for it
                known.was_scaled = False
                known.scaled += 1
                if known.scaled == _REPEATS:
                    self._say_unscaled(known)
            known.clipping.backward_begins()
            if known.follows:
                known.sums.backward_begins()
                known.micro.backward_begins()
            measure = (
                known.carried >= _REPEATS - 1 or known.carried_some >= _SOME - 1
            ) and not self._has_said_carried()
            for followed in known.followed if known.follows else ():
                followed.backward_begins(measure)
            self._look_for_mixture(optimizer, known)
        if self._since_step == _PATIENCE and not self._steps:
            self._say_no_step()

    # GradScaler's unscaling leaves a tensor's version as it is. Whatever else changes gradients after it, such as a
    # closure that sets them to zero and tries the step again, makes the rest of the step one that is not judged.
    def _look_for_mixture(self, optimizer: Any, known: FollowedOptimizer) -> None:
        unscaled = known.follows and self._of_scaled and self._has_unscaled(optimizer)
        same = unscaled and all(followed.is_as_backward_left_it() for followed in known.followed)
        known.dropped = unscaled and (known.dropped or not same)
        known.was_unscaled = unscaled and not known.dropped

    def _look_behind(self, tensors: Any) -> None:
        """Look for a softmax of a softmax in the first backwards."""
        self._squashed = ""
        first_of_step = self._since_step == 1 and self._steps <= _REPEATS
        sampled = self._since_step == 1 and self.core.sample is not None
        if not self._known or not (self._looks or first_of_step or sampled):
            return
        listed: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        roots = [root for root in listed if isinstance(root, Tensor)]
        is_loss = len(roots) == 1 and roots[0].numel() == 1
        if sampled and is_loss:
            self._targets.look_at_classes(roots[0])
        if self._looks:
            self._looks -= 1
            self._squashed = autograd_graph.squashed_twice(roots)
            if is_loss:
                self._look_behind_loss(roots[0])
        if first_of_step and is_loss and roots[0].grad_fn is not None:
            self._look_at_casts(roots[0])

    def _look_behind_loss(self, loss: Tensor) -> None:
        """Look for sums in 16 bits, divisions, terms without the scale, and indices that were rounded."""
        self._divided, self._divisors = autograd_graph.divided_twice(loss), autograd_graph.divided_by(loss)
        count, dtype = autograd_graph.length_of_sum(loss)
        if dtype in SIXTEEN_BIT and count >= 2 ** (FORMATS[dtype].mantissa_bits + 1):
            fmt = FORMATS[dtype].name
            self._say("loss added up", f"the loss adds {count:,} numbers one by one in {fmt}", terms=count, format=fmt)
        names = self._names()
        self._look_at_batch_norms(loss, names)
        scale = getattr(None if self._scaler is None else self._scaler(), "_scale", None)
        is_first = self._backwards == 1 and "scaled twice" not in self._said  # else the loss is not known
        self._targets.look_behind(loss, scale if isinstance(scale, Tensor) else None, is_first=is_first)
        if isinstance(scale, Tensor):
            leaves = autograd_graph.unscaled_leaves(loss, scale)
            if apart := [names[id(leaf)] for leaf in leaves if id(leaf) in names]:
                message = f"only a part of the loss carries the loss scale: {_listed(apart)} get gradients without it"
                self._later("part unscaled", message, self._scales(), parameters=apart)
        for table, indices in autograd_graph.rows_looked_up(loss):
            if id(table) in names:
                self._look_at_indices(names[id(table)], indices.detach())

    # The last batch of an epoch may be as small: several on end are no chance.
    def _look_at_batch_norms(self, loss: Tensor, names: Mapping[int, str]) -> None:
        few = (weight for weight, values in autograd_graph.values_normalised(loss) if values == _PAIR)
        self._pairs.append({names[id(weight)].removesuffix(".weight") for weight in few if id(weight) in names})
        pairs = sorted(self._pairs[0].intersection(*self._pairs))
        if len(self._pairs) == _LOOKS and pairs:
            self._say("norm of two values", f"{_listed(pairs)} normalise two values of a channel", modules=pairs)
        if last := norms_of_last_batch(self.core.model()):
            self._say("norm of the last batch", f"{_listed(last)} evaluate by the last batch alone", modules=last)

    # Autocast casts a weight once, and keeps the cast until its outermost context is left. The same cast in the graph
    # of a later step, of a weight that was written since, is one that nobody has made again.
    def _look_at_casts(self, loss: Tensor) -> None:
        stale = list[str]()
        names = self._names()
        # Operations are counted by thread: a forward on a thread of its own begins at 0 again, and shows nothing.
        before, self._root = self._root, autograd_graph.position(loss.grad_fn)
        if self._root <= before:
            return
        for leaf, place in autograd_graph.casts_of_leaves(loss):
            version = self._casts.setdefault((id(leaf), place), leaf._version)  # noqa: SLF001  (public in all but name)
            if leaf._version > version and id(leaf) in names:  # noqa: SLF001  (likewise)
                stale.append(names[id(leaf)])
        if stale:
            message = f"the forward uses casts of {_listed(stale)} from before the last step: autocast has kept them"
            self._say("stale casts", message, parameters=stale)

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
            self._later(
                "indices rounded", message, holds, key=f"{fmt} {name} {self._looks}", parameters=[name], format=fmt
            )

    @contained
    def norm_taken(self, norm: Any, tensors: int) -> None:
        """The norm of so many gradients was taken, to clip them."""
        if self._idle():
            return
        self._norms.append(tensors)
        if self._since_step:
            for known in list(self._known.values()):
                known.clipping.norm_taken()

    @contained
    def backward_ends(self) -> None:
        """A backward has ended."""
        if not self._idle():
            for known in list(self._known.values()):
                if not known.follows:
                    continue
                known.sums.backward_ends()
                known.roundings.backward_ends()
                reached = [followed.backward_ends() for followed in known.followed]
                if any(reached):
                    known.micro.backward_ends()
                if self._squashed and any(reached):
                    message = f"the loss applies a {self._squashed} to the results of a {self._squashed}"
                    self._say("squashed twice", message, function=self._squashed)
                known.from_scaled |= self._of_scaled and any(reached)
                known.mixed += known.was_unscaled and any(reached)
                if known.mixed == _REPEATS:
                    self._say_mixed(known)
            if self._backwards == _FEWEST and not self._known:
                self._look_for_other_parameters()

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer's step is called."""
        if self._idle():
            return
        known = self._meet(optimizer)
        if known is None:
            return
        if not self._judged or self._due is not None or (self._ungraded and self.core.sample is not None):
            self._look_for_gradients()
        known.had_gradients = has_gradients(optimizer)
        self._targets.step_begins(optimizer)
        if not known.steps:
            self._first_weights.first_step_begins()
        if known.follows:
            self._follow(optimizer, known)
            self._look_at_sums(known)
            self._look_for_overwrites(known)
            self._look_at_roundings(known)
            self._look_at_micro_batches(known)
        self._look_at_moments(optimizer, known)
        self._look_at_state(optimizer, known)
        self._mode.step_begins(known.steps)
        if self._divided and self._divided == self._since_step:
            message = f"the loss is divided by {self._divided} twice, the number of micro-batches of a step"
            self._say("divided twice", message, by=self._divided)
        self._schedules.step_begins(optimizer, known.name, known.rates)
        if self.core.sample is not None:
            self._look_for_frozen(optimizer, known)
            if norms := self._frozen_norms.look(self.core.model()):
                message = f"{_listed(norms)} have frozen weights, and running statistics that follow the data"
                self._say("frozen norms follow", message, modules=norms)
            self._look_for_new(known)

    # Gradients are followed by identity and version: torch raises a tensor's version with every change in place. Only a
    # few parameters of each optimizer are followed, in its first steps and then in some of every 64, since errors last.
    # Nothing here waits for a device. Each fact is one event of kind "wiring".
    def _follow(self, optimizer: Any, known: FollowedOptimizer) -> None:
        known.was_scaled = known.from_scaled and getattr(optimizer, "grad_scale", None) is None
        known.was_scaled &= all(followed.is_as_backward_left_it() for followed in known.followed)
        known.was_scaled &= not self._has_unscaled(optimizer)  # which leaves a gradient's version as it is
        known.from_scaled = False
        if not known.was_scaled:
            known.scaled = 0
        carried = [followed for followed in known.followed if followed.carried]
        is_carried = bool(known.followed) and len(carried) == len(known.followed)
        known.carried = known.carried + 1 if is_carried else 0
        known.carried_some += is_carried
        if known.carried == _REPEATS or (is_carried and known.carried_some == _SOME):
            self._say_carried(known, carried, some=known.carried < _REPEATS)

    def _look_at_sums(self, known: FollowedOptimizer) -> None:
        sums, counts = known.sums, known.sums.counts()
        if counts is not None and known.rounded < _REPEATS:
            known.rounded += 1
            message = f"gradients of {sums.backwards:,} micro-batches are added up in {sums.format}, and rounded away"
            self._later(
                "sum rounded", message, lambda: is_rounded_away(counts), known, key=f"sum rounded: {known.rounded}",
                backwards=sums.backwards, format=sums.format,
            )  # fmt: skip
        sums.step_ends()

    def _look_at_micro_batches(self, known: FollowedOptimizer) -> None:
        many = known.micro.step_begins(self._divisors)
        if known.micro.lost == _REPEATS:
            message = f"gradients are cleared before each of {many} micro-batches: the step is of the last one alone"
            self._say("cleared between", message, optimizer=known.name, backwards=many)

    def _look_at_clipping(self, known: FollowedOptimizer) -> None:
        norms, self._norms = self._norms, []
        known.unclipped = known.unclipped + 1 if norms and not any(norms) and known.had_gradients else 0
        if known.unclipped == _REPEATS:
            message = f"the norm for clipping the gradients of {known.name} is of no gradient: nothing is clipped"
            self._say("clipped nothing", message, optimizer=known.name)

    def _look_at_roundings(self, known: FollowedOptimizer) -> None:
        roundings = known.roundings
        if roundings.is_over:
            return
        roundings.step_begins()
        step = self.core.step
        for fact, steps, read, what in (
            ("weights rounded", tuple(roundings.weights), rounding_of, "weights are rounded to {} after each step"),
            ("gradients rounded", tuple(roundings.gradients), flush_of, "gradients are rounded to {} before each step"),
        ):
            if len(steps) < _REPEATS or fact in self._said:
                continue

            def produce(fact: str = fact, steps: Any = steps, read: Any = read, what: str = what) -> list[Record]:
                found = read(steps)
                if found is None or fact in self._said:
                    return []
                self._said.add(fact)
                details = {"fact": fact, "optimizer": known.name, **found}
                return [Event(step=step, kind="wiring", message=what.format(found["format"]), details=details)]

            self.core.writer.submit(produce, 400)

    def _look_at_moments(self, optimizer: Any, known: FollowedOptimizer) -> None:
        moments = known.moments
        replaced = moments.step_begins(optimizer)
        if replaced is not None:
            step, name = self.core.step, known.name

            def produce() -> list[Record]:
                share = share_of_zeros(replaced)
                message = f"second moments of {name} went through FP16, and some became zero"
                details = {"fact": "moments flushed", "optimizer": name, "lost": share, "format": "fp16"}
                return [Event(step=step, kind="wiring", message=message, details=details)] if share else []

            self.core.writer.submit(produce, 400)
        steps = tuple(moments.stepped)
        if len(steps) == _REPEATS:
            message = f"second moments of {known.name} are kept in {moments.format}, and their decay is rounded away"
            self._later(
                "moments narrow", message, lambda: are_nearest(steps), known, format=moments.format,
                decay=moments.decay,
            )  # fmt: skip

    def _look_at_state(self, optimizer: Any, known: FollowedOptimizer) -> None:
        if (steps := self._states.step_begins(optimizer, self.core.step)) is not None:
            message = f"the state of {known.name} is cleared every {steps} steps or so, or another begins without one"
            self._say("state cleared", message, optimizer=known.name, steps=steps, times=_REPEATS)

    def _look_for_overwrites(self, known: FollowedOptimizer) -> None:
        known.overwrites.step_begins()
        undone = tuple(known.overwrites.undone)
        if len(undone) == _REPEATS:
            message = f"the updates of {known.name} are undone after each step: something else writes the weights"
            self._later("updates undone", message, lambda: are_undone(undone), known)

    @contained
    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        known = self._known.get(optimizer)
        if known is None or self._idle():
            return
        known.steps += 1
        if known.steps == 1:
            self._look_at_epsilon(optimizer, known)
        known.roundings.step_ends()
        self._look_at_clipping(known)
        known.clipping.step_ends()
        if len(found := tuple(known.clipping.found)) == _REPEATS:
            message = f"gradients of {known.name} are clipped before the last micro-batch of a step is added"
            self._later("clipped early", message, lambda: all((resolved(number) or 0) > 0 for number in found), known)
        known.moments.step_ends(optimizer)
        self._states.step_ends(optimizer, self.core.step)
        for each in list(self._known.values()):
            if each is not known:
                each.overwrites.forget()
            elif known.follows:
                known.overwrites.step_ends()
        if known.steps > self._steps:
            self._steps = known.steps
            self._averages.step_ends(self._steps, self._owned)
        has = known.had_gradients or has_gradients(optimizer)  # a closure makes them inside the step
        known.empty = 0 if has or not self._since_step else known.empty + 1
        self._since_step = 0
        if known.empty == _REPEATS:
            self._say(
                "no gradients",
                f"{known.name} steps, and none of its parameters has a gradient: they are set to None or zero between "
                "the backward and the step, or the loss does not depend on them.",
                key=f"no gradients: {known.name}",
                optimizer=known.name,
            )
        known.step_ends()
        self._judge_at(known.steps)

    def _judge_at(self, steps: int) -> None:
        """Do what is due when an optimizer has made so many steps."""
        if steps == _JUDGED_STEPS:
            self._first_weights.look_at_rows()
            if not self._judged:
                self._judge(warn=True)
        if self._due is not None and steps >= self._due:
            self._due = None
            self._say_outside(self._trained(), self._owned(), warn=True)
        if steps == _PATIENCE:
            self._say_no_step()

    @contained
    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss."""
        enabled = getattr(scaler, "is_enabled", None)
        if not callable(enabled) or enabled():
            self._scaler = weakref.ref(scaler)
            self._scaled = weakref.ref(scaled) if isinstance(scaled, Tensor) else None
            scale = getattr(scaler, "_scale", None)
            if isinstance(loss, Tensor) and isinstance(scale, Tensor):
                twice = not self._idle() and autograd_graph.is_multiple_of_scaled(loss, scale)
                if twice:
                    self._later("scaled twice", "a loss that was scaled already is scaled again", self._scales())

    @contained
    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned."""
        known = self._known.get(innermost(optimizer))
        if known is not None:
            known.was_scaled, known.scaled = False, 0
            known.steps += not known.steps  # a step that a scaler skips is one
            self._steps = max(self._steps, known.steps)

    @contained
    def plateau_steps(self, scheduler: Any, metric: Any, lowered: bool) -> None:
        """A `ReduceLROnPlateau` has taken a metric."""
        known = None if self._idle() else self._meet(innermost(scheduler.optimizer))
        if known is not None:
            self._schedules.plateau_steps(scheduler, metric, known.name, lowered=lowered)

    @contained
    def schedule_made(self, scheduler: Any) -> None:
        """A schedule of learning rates was made."""
        known = None if self._idle() else self._meet(innermost(scheduler.optimizer))
        if known is not None:
            self._schedules.made(scheduler, known.rates)

    # -- what is said

    def _judge(self, *, warn: bool) -> None:
        """Names the parameters that are not trained."""
        self._judged = True
        model = self.core.model()
        if model is None or not self._known:
            return
        owned, trained = self._owned(), self._trained()
        self._ungraded = {key: name for key, name in trained.items() if key in owned and key not in self._graded}
        who = self._say_outside(trained, owned, warn=warn)
        if self._ungraded:
            names = list(self._ungraded.values())
            message = f"{len(names)} parameters of {who} have had no gradient so far ({_listed(names)})"
            self._say("without gradient", message, parameters=names, of=len(trained), optimizers=who)

    def _trained(self) -> dict[int, str]:
        """Return the names of the parameters that require gradients, and keep which they are."""
        model = self.core.model()
        named = [(name, p) for name, p in all_parameters(model) if p.requires_grad]
        self._trainable = {id(p): weakref.ref(p) for _, p in named}
        return {id(p): name for name, p in named}

    def _say_outside(self, trained: Mapping[int, str], owned: set[int], *, warn: bool) -> str:
        """Name the parameters that get gradients and are in no optimizer; return the optimizers' names."""
        who = ", ".join(dict.fromkeys(known.name for known in self._known.values()))
        before = set(self._unowned.values())
        self._unowned = {key: name for key, name in trained.items() if key not in owned and key in self._graded}
        names = [name for name in self._unowned.values() if name not in before]
        if names:
            self._say(
                "in no optimizer",
                f"{len(names)} parameters get gradients and are in no optimizer that has stepped ({_listed(names)}): "
                "they do not change. Give them to an optimizer, or set requires_grad to False.",
                warn=warn,
                key=f"in no optimizer: {names}",
                parameters=names,
                optimizers=who,
            )
        return who

    # A layer that is replaced, or unfrozen, during the training is easily left out of the optimizer.
    def _look_for_new(self, known: FollowedOptimizer) -> None:
        """Have it judged some steps later whether parameters that are new are in an optimizer."""
        model = self.core.model()
        if not self._judged or self._due is not None or model is None:
            return
        mine = self._trainable
        new = {id(p) for p in model.parameters() if p.requires_grad and (id(p) not in mine or mine[id(p)]() is not p)}
        if new:
            self._graded -= new  # by identities of parameters that are gone
            self._due = known.steps + _JUDGED_STEPS

    def _look_for_gradients(self) -> None:
        """Notes the parameters that have a gradient for the first time."""
        model = self.core.model()
        with_gradient = [id(p) for _, p in all_parameters(model) if p.grad is not None]
        late = [self._ungraded.pop(key) for key in with_gradient if key in self._ungraded]
        if late:
            self.core.say("wiring", f"gradients have come to {_listed(late)}", fact="gradient came", parameters=late)
        self._graded.update(with_gradient)

    def _look_for_frozen(self, optimizer: Any, known: FollowedOptimizer) -> None:
        """Record the parameters that are frozen and have gradients still, so that they are stepped on."""
        stepped = {id(p) for p in parameters_of(optimizer) if not p.requires_grad and p.grad is not None}
        frozen = [name for key, name in self._names().items() if key in stepped] if stepped else []
        if frozen:
            message = f"{known.name} steps on frozen parameters, which have gradients still: {_listed(frozen)}"
            self._say("frozen stepped", message, key=f"frozen: {known.name}", optimizer=known.name, parameters=frozen)

    # With an epsilon of 2^-25 or less and its state in FP16, Adam divides by zero from the first step on: too soon for
    # a rule that wants two samples.
    def _look_at_epsilon(self, optimizer: Any, known: FollowedOptimizer) -> None:
        """Record an epsilon of Adam that is zero in the format of its second moments."""
        names, lost, least = self._names(), list[str](), math.inf
        for group in optimizer.param_groups if kind_of(optimizer) == OWN else ():
            epsilon = group.get("eps")
            if not isinstance(epsilon, int | float):
                continue
            for p in group["params"]:
                state: Mapping[str, object] = optimizer.state.get(p, {})
                moments = [state.get(key) for key in _ROOTED]
                halves = [x for x in moments if isinstance(x, Tensor) and x.dtype == torch.float16]
                if halves and epsilon <= _FP16_ZERO and id(p) in names:
                    lost.append(names[id(p)])
                    least = min(least, float(epsilon))
        if lost:
            self._say(
                "epsilon lost",
                f"{known.name} keeps second moments in FP16, where its epsilon of {least:g} is zero: it divides by "
                "zero where a second moment is zero.",
                key=f"epsilon lost: {known.name}",
                optimizer=known.name,
                epsilon=least,
                parameters=lost,
            )

    # An optimizer may let one inside it make the steps, under another name than `step`, as SAM's two steps are.
    def _say_no_step(self) -> None:
        stepped = {id(p) for optimizer, known in self._known.items() if known.steps for p in parameters_of(optimizer)}
        never = [
            known.name
            for optimizer, known in self._known.items()
            if not known.steps and any(id(p) not in stepped for p in parameters_of(optimizer))
        ]
        some = self._steps > 0
        if never or not some:
            who = ", ".join(never) or "no optimizer with the model's parameters"
            self._say(
                "never stepped",
                f"{who}: not a step in {self._backwards:,} backward passes"
                + (", in which others stepped." if some else ", so no step moves the weights."),
                optimizer=who,
                backwards=self._backwards,
                others=some,
                nonfinite=not some and self._gradients_are_broken(),
            )

    def _gradients_are_broken(self) -> bool:
        """Return True if a gradient holds NaN or Inf; waits for the device, once.

        For these a script may skip its steps.
        """
        model = self.core.model()
        gradients = [] if model is None else [p.grad.detach() for p in model.parameters() if p.grad is not None]
        return any(not bool(torch.isfinite(g).all()) for g in gradients if g.layout == torch.strided and not g.is_meta)

    def _has_said_carried(self) -> bool:
        return "carried over" in self._said or "carried at some steps" in self._said

    # `torch.func.functional_call` runs a model with weights that no module has, and leaves the model's own alone.
    def _look_for_other_parameters(self) -> None:
        model = self.core.model()
        own = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        if own and all(p.grad is None for p in own):
            self._say(
                "other parameters", "the model is called with other parameters than its own: these get no gradient"
            )

    def _say_carried(self, known: FollowedOptimizer, carried: list[FollowedGradient], *, some: bool) -> None:
        if self._has_said_carried():
            return
        sizes = [followed.size for followed in carried if followed.size is not None]
        many = f" at {known.carried_some} of the first {known.steps + 1} steps" if some else ""
        why = "zero_grad() is not called at each step" if some else "nothing sets them to zero"
        message = f"gradients of {known.name} are added to those of the step before{many}: {why}. Call "
        fact = "carried at some steps" if some else "carried over"
        self._later(
            fact, f"{message}optimizer.zero_grad() once a step.",
            lambda: any((resolved(size) or 0.0) > 0 for size in sizes), known,
            carried=known.carried_some, of=known.steps + 1,
        )  # fmt: skip

    def _say_unscaled(self, known: FollowedOptimizer) -> None:
        message = (
            f"{known.name} is given the gradients of a scaled loss as they are: call scaler.step(optimizer) in "
            "place of optimizer.step(), or scaler.unscale_(optimizer) before it."
        )
        self._later("not unscaled", message, self._scales(), known)

    def _say_mixed(self, known: FollowedOptimizer) -> None:
        message = (
            f"gradients of a scaled loss are added to those of {known.name} that the scaler has unscaled already: call "
            "scaler.unscale_(optimizer) once a step, after the last backward."
        )
        self._later("added after unscaling", message, self._scales(), known)

    def _scales(self) -> Callable[[], bool]:
        """Return a function that tests the loss scale against 1 once it is known."""
        scale = getattr(None if self._scaler is None else self._scaler(), "_scale", None)
        value = number(scale.detach()) if isinstance(scale, Tensor) else None
        return lambda: value is None or resolved(value) != 1.0

    def _has_unscaled(self, optimizer: Any) -> bool:
        return has_unscaled(self._scaler and self._scaler(), optimizer)

    def _later(
        self, fact: str, message: str, holds: Callable[[], bool], known: FollowedOptimizer | None = None, key: str = "",
        **more: object,
    ) -> None:  # fmt: skip
        """Record a fact on the background thread, once for each key."""
        if (key or fact) in self._said:
            return
        self._said.add(key or fact)
        step, details = self.core.step, {"fact": fact, "optimizer": "" if known is None else known.name, **more}

        def produce() -> list[Record]:
            return [Event(step=step, kind="wiring", message=message, details=details)] if holds() else []

        self.core.writer.submit(produce, 200)

    def _say(self, fact: str, message: str, *, warn: bool = False, key: str = "", **details: object) -> None:
        """Record a fact, once for each key. Default: the key is the fact itself."""
        if (key or fact) not in self._said:
            self._said.add(key or fact)
            self.core.say("wiring", message, once=None, warn=warn, fact=fact, **details)

    @contained
    def _close(self) -> None:
        """The watch closes: what was to be judged later is judged by what there is."""
        if self._backwards < _FEWEST:
            return
        if self._steps >= _FEWEST and not self._judged:
            self._judge(warn=False)
        if not self._steps or self._steps >= _JUDGED_STEPS:
            self._say_no_step()
        self._averages.look(self._steps, self._owned())

    # -- what there is

    def _idle(self) -> bool:
        core = self.core
        return not core.open or core.muted or core.is_elsewhere() or WatchSession.repeating or is_capturing()

    def _meet(self, optimizer: Any) -> FollowedOptimizer | None:
        """Return the optimizer's state; None if it has none of the model's parameters."""
        known = self._known.get(optimizer)
        if known is None and self._foreign.get(optimizer, 0) >= _REPEATS:
            return None
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if known is not None and known.size == size:
            return known
        model = self.core.model()
        mine = {id(p) for p in model.parameters()} if model is not None else set[int]()
        params = [p for p in parameters_of(optimizer) if id(p) in mine]
        if not params:
            self._foreign[optimizer] = self._foreign.get(optimizer, 0) + 1
            return None
        if known is None:
            known = self._known[optimizer] = FollowedOptimizer(optimizer)
        known.size = size
        late = [self._unowned.pop(id(p)) for p in params if id(p) in self._unowned]
        if late:
            self.core.say("wiring", f"{known.name} has taken {_listed(late)}", fact="joined", parameters=late)
        return known

    def _owned(self) -> set[int]:
        """The parameters of all optimizers, by identity."""
        return {id(p) for optimizer in [*self._known, *self._foreign] for p in parameters_of(optimizer)}

    def _names(self) -> Mapping[int, str]:
        model = self.core.model()
        return {} if model is None else {id(p): clean(name) for name, p in model.named_parameters()}


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
