"""Check of the operations behind a loss, in the first backwards.

- A softmax or sigmoid before a loss that applies one itself.
- Losses that are divided by the number of micro-batches twice, scaled twice, or of which only a part carries the loss
  scale, and losses that are added up in 16 bits.
- Batch norms over two values, and those that evaluate by the last batch alone.
- Indices that were rounded to 16 bits.
- Casts of weights that autocast keeps from before the last step.
- Targets, classes and log probabilities: see `targets`.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.watch.hooks import autograd_graph
from plimsoll.watch.steps.wiring.checks import REPEATS, FollowedOptimizer, Training, TrainingCheck, listed
from plimsoll.watch.steps.wiring.modes import norms_of_last_batch
from plimsoll.watch.steps.wiring.targets import Targets

_LOOKS = 3  # backwards behind whose loss it is looked: the way to a loss rarely changes
_PAIR = 2  # values of which a norm leaves 1 and -1, whatever they are
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
        self._casts: dict[tuple[int, int], int] = {}  # versions of the weights that casts were made of
        self._root = -1  # place of the last loss among the operations

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        training = self.training
        self._squashed = ""
        is_first = training.since_step == 1
        first_of_step = is_first and training.steps <= REPEATS
        sampled = is_first and self.core.sample is not None
        if not training.optimizers or not (self._looks or first_of_step or sampled):
            return
        given: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        roots = [root for root in given if isinstance(root, Tensor)]
        is_loss = len(roots) == 1 and roots[0].numel() == 1
        if sampled and is_loss:
            self._targets.look_at_classes(roots[0])
        if self._looks:
            self._looks -= 1
            self._squashed = autograd_graph.squashed_twice(roots)
            if is_loss:
                self._look_behind(roots[0])
        if first_of_step and is_loss and roots[0].grad_fn is not None:
            self._look_at_casts(roots[0])

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self._squashed and any(followed.reached for followed in self.training.optimizers.values()):
            message = f"the loss applies a {self._squashed} to the results of a {self._squashed}"
            self.facts.say("squashed twice", message, function=self._squashed)

    def loss_scaled(self, loss: Tensor, scale: Tensor) -> None:
        """A loss was scaled."""
        if autograd_graph.is_multiple_of_scaled(loss, scale):
            self.facts.later("scaled twice", "a loss that was scaled already is scaled again", self.training.scales())

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called."""
        self._targets.step_begins(optimizer)
        if self._divided and self._divided == self.training.since_step:
            message = f"the loss is divided by {self._divided} twice, the number of micro-batches of a step"
            self.facts.say("divided twice", message, by=self._divided)

    def _look_behind(self, loss: Tensor) -> None:
        self._divided = autograd_graph.divided_twice(loss)
        self.training.divisors = autograd_graph.divided_by(loss)
        count, dtype = autograd_graph.length_of_sum(loss)
        if dtype in SIXTEEN_BIT and count >= 2 ** (FORMATS[dtype].mantissa_bits + 1):
            fmt = FORMATS[dtype].name
            message = f"the loss adds {count:,} numbers one by one in {fmt}"
            self.facts.say("loss added up", message, terms=count, format=fmt)
        names, scale = self.training.names(), self.training.scale()
        self._look_at_batch_norms(loss, names)
        is_first = self.training.backwards == 1 and not self.facts.has("scaled twice")  # else the loss is not known
        self._targets.look_behind(loss, scale, is_first=is_first)
        if scale is not None:
            leaves = autograd_graph.unscaled_leaves(loss, scale)
            if apart := [names[id(leaf)] for leaf in leaves if id(leaf) in names]:
                message = f"only a part of the loss carries the loss scale: {listed(apart)} get gradients without it"
                self.facts.later("part unscaled", message, self.training.scales(), parameters=apart)
        for table, indices in autograd_graph.rows_looked_up(loss):
            if id(table) in names:
                self._look_at_indices(names[id(table)], indices.detach())

    # The last batch of an epoch may be as small: several on end are no chance.
    def _look_at_batch_norms(self, loss: Tensor, names: Mapping[int, str]) -> None:
        few = (weight for weight, values in autograd_graph.values_normalised(loss) if values == _PAIR)
        self._pairs.append({names[id(weight)].removesuffix(".weight") for weight in few if id(weight) in names})
        pairs = sorted(self._pairs[0].intersection(*self._pairs))
        if len(self._pairs) == _LOOKS and pairs:
            message = f"{listed(pairs)} normalise two values of a channel"
            self.facts.say("norm of two values", message, modules=pairs)
        if last := norms_of_last_batch(self.training.model()):
            self.facts.say("norm of the last batch", f"{listed(last)} evaluate by the last batch alone", modules=last)

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
            self.facts.say("stale casts", message, parameters=stale)

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
            self.facts.later(
                "indices rounded", message, holds, key=f"{fmt} {name} {self._looks}", parameters=[name], format=fmt
            )
