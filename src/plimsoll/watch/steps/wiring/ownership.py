"""Checks of which optimizer steps on which parameters.

- Parameters that require gradients and are in no optimizer, or in one and never get a gradient.
- Frozen parameters that have gradients still, so that an optimizer steps on them.
- A model that is called with other parameters than its own, or through which other tensors are learned.
- An optimizer that never steps.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.watch.hooks.autograd_graph import leaves_of
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.optimizer_tensors import parameters_of
from plimsoll.watch.steps.wiring.checks import FollowedOptimizer, Training, TrainingCheck, listed

JUDGED_STEPS = 10  # of an optimizer, after which parameters that have had no gradient are named

_MOST_KEPT = 256  # of a list or dict: more are data
_FEWEST = 3  # backwards or steps by which it may be judged
_LOOKED_AT = 20  # backwards: what the first ones reach is looked at
_PATIENCE = 200  # backwards, or steps of others, after which an optimizer that has not stepped is named


class Ownership(TrainingCheck):
    """Parameters that no optimizer trains, and those that an optimizer steps on without need."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._graded: set[int] = set()  # parameters that have had a gradient
        self._unowned: dict[int, str] = {}  # those that were said to be in no optimizer
        self._ungraded: dict[int, str] = {}  # and those to have no gradient
        self._judged = False
        self._trainable: dict[int, weakref.ref[Tensor]] = {}  # when it was judged last
        self._due: int | None = None  # steps of an optimizer after which new parameters are judged

    def optimizer_met(self, followed: FollowedOptimizer, params: list[Tensor]) -> None:
        """An optimizer is seen for the first time, or has other parameters, these of the model."""
        late = [self._unowned.pop(id(p)) for p in params if id(p) in self._unowned]
        if late:
            message = f"{followed.name} has taken {listed(late)}"
            self.session.say("wiring", message, fact="joined", parameters=late)

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called."""
        sampled = self.session.sample is not None
        if not self._judged or self._due is not None or (self._ungraded and sampled):
            self._look_for_gradients()
        if sampled:
            self._look_for_frozen(optimizer, followed)
            self._look_for_new(followed)

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        if followed.steps == JUDGED_STEPS and not self._judged:
            self._judge(warn=True)
        if self._due is not None and followed.steps >= self._due:
            self._due = None
            self._look_outside(self._trained(), warn=True)

    def closes(self) -> None:
        """The watch closes."""
        if self.training.steps >= _FEWEST and not self._judged:
            self._judge(warn=False)

    def _judge(self, *, warn: bool) -> None:
        """Record the parameters that are not trained."""
        self._judged = True
        if self.training.model() is None or not self.training.optimizers:
            return
        owned, trained = self.training.owned(), self._trained()
        self._ungraded = {key: name for key, name in trained.items() if key in owned and key not in self._graded}
        who = self._look_outside(trained, warn=warn)
        if self._ungraded:
            names = list(self._ungraded.values())
            message = f"{len(names)} parameters of {who} have had no gradient so far ({listed(names)})"
            self.facts.record("without gradient", message, parameters=names, of=len(trained), optimizers=who)

    def _trained(self) -> dict[int, str]:
        """Return the names of the parameters that require gradients, and keep which they are."""
        named = [(name, p) for name, p in _all_parameters(self.training.model()) if p.requires_grad]
        self._trainable = {id(p): weakref.ref(p) for _, p in named}
        return {id(p): name for name, p in named}

    def _look_outside(self, trained: Mapping[int, str], *, warn: bool) -> str:
        """Record the parameters that get gradients and are in no optimizer; return the optimizers' names."""
        who = ", ".join(dict.fromkeys(followed.name for followed in self.training.optimizers.values()))
        before, owned = set(self._unowned.values()), self.training.owned()
        self._unowned = {key: name for key, name in trained.items() if key not in owned and key in self._graded}
        names = [name for name in self._unowned.values() if name not in before]
        if names:
            self.facts.record(
                "in no optimizer",
                f"{len(names)} parameters get gradients and are in no optimizer that has stepped ({listed(names)}): "
                "they do not change. Give them to an optimizer, or set requires_grad to False.",
                warn=warn,
                key=f"in no optimizer: {names}",
                parameters=names,
                optimizers=who,
            )
        return who

    # A layer that is replaced, or unfrozen, during the training is easily left out of the optimizer.
    def _look_for_new(self, followed: FollowedOptimizer) -> None:
        """Have it judged some steps later whether parameters that are new are in an optimizer."""
        model = self.training.model()
        if not self._judged or self._due is not None or model is None:
            return
        mine = self._trainable
        new = {id(p) for p in model.parameters() if p.requires_grad and (id(p) not in mine or mine[id(p)]() is not p)}
        if new:
            self._graded -= new  # by identities of parameters that are gone
            self._due = followed.steps + JUDGED_STEPS

    def _look_for_gradients(self) -> None:
        """Note the parameters that have a gradient for the first time."""
        with_gradient = [id(p) for _, p in _all_parameters(self.training.model()) if p.grad is not None]
        late = [self._ungraded.pop(key) for key in with_gradient if key in self._ungraded]
        if late:
            self.session.say("wiring", f"gradients have come to {listed(late)}", fact="gradient came", parameters=late)
        self._graded.update(with_gradient)

    def _look_for_frozen(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """Record the parameters that are frozen and have gradients still, so that they are stepped on."""
        stepped = {id(p) for p in parameters_of(optimizer) if not p.requires_grad and p.grad is not None}
        frozen = [name for key, name in self.training.names().items() if key in stepped] if stepped else []
        if frozen:
            name = followed.name
            message = f"{name} steps on frozen parameters, which have gradients still: {listed(frozen)}"
            self.facts.record("frozen stepped", message, key=f"frozen: {name}", optimizer=name, parameters=frozen)


class OtherTensors(TrainingCheck):
    """Trainings of other tensors than the model's parameters.

    `torch.func.functional_call` runs a model with weights that no module has. Inputs, prompts or attacks are learned
    through a model, whose own weights stay.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._reached: list[set[int]] = []  # leaves, by each of the first backwards
        self._reaches_modules = False  # the last backward reaches parameters of some module

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        if self.training.backwards <= _LOOKED_AT and not self.training.optimizers:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            leaves = leaves_of([root for root in roots if isinstance(root, Tensor)])
            self._reached.append(set(leaves))
            self._reaches_modules = any(isinstance(leaf, nn.Parameter) for leaf in leaves.values())

    def backward_ends(self) -> None:
        """A backward has ended."""
        if self.training.backwards == _FEWEST and not self.training.optimizers:
            self._look_for_other_weights()
        if self.training.backwards == _LOOKED_AT:
            self._look_for_inputs()

    def closes(self) -> None:
        """The watch closes."""
        self._look_for_inputs()

    # The backward of a student reaches parameters of modules, and a teacher has no gradient either.
    def _look_for_other_weights(self) -> None:
        model = self.training.model()
        own = [p for p in model.parameters() if p.requires_grad] if model is not None else []
        if own and all(p.grad is None for p in own) and not self._reaches_modules:
            message = "the model is called with other parameters than its own: these get no gradient"
            self.facts.record("other parameters", message)

    # A discriminator whose generator never steps has backwards of its own, which do not reach the generator.
    def _look_for_inputs(self) -> None:
        own = self.training.names().keys()
        others = self.training.owned() - own
        through = [leaves for leaves in self._reached if leaves & others]
        if through and not self.training.optimizers and all(leaves & own for leaves in through):
            who = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.training.foreign))
            message = f"{who} steps on other tensors, whose gradients come through the model"
            self.facts.record("other tensors", message, optimizer=who)


class NeverStepped(TrainingCheck):
    """Optimizers that make no step."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._is_trained = False  # a parameter has had a gradient

    def backward_ends(self) -> None:
        """A backward has ended."""
        if not self._is_trained and self.training.backwards <= _LOOKED_AT:
            self._is_trained = self._has_gradient()

    def backward_begins(self, tensors: Any) -> None:
        """A backward begins, of these tensors."""
        if self.training.backwards_since_step == _PATIENCE and not self.training.steps:
            self._look()

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        if followed.steps == _PATIENCE:
            self._look()

    def closes(self) -> None:
        """The watch closes."""
        if not self.training.steps or self.training.steps >= JUDGED_STEPS:
            self._look()

    # An optimizer may let one inside it make the steps, under another name than `step`, as SAM's two steps are.
    def _look(self) -> None:
        optimizers, backwards = list(self.training.optimizers.items()), self.training.backwards
        stepped = {id(p) for optimizer, followed in optimizers if followed.steps for p in parameters_of(optimizer)}
        never = [
            followed.name
            for optimizer, followed in optimizers
            if not followed.steps and any(id(p) not in stepped for p in parameters_of(optimizer))
        ]
        some = self.training.steps > 0
        # A teacher or a target network is only called: all backward passes are those of another model.
        if never or (not some and (self._is_trained or self._has_gradient())):
            who = ", ".join(never) or "no optimizer with the model's parameters"
            self.facts.record(
                "never stepped",
                f"{who}: not a step in {backwards:,} backward passes"
                + (", in which others stepped." if some else ", so no step moves the weights."),
                optimizer=who,
                backwards=backwards,
                others=some,
                nonfinite=not some and self._gradients_are_broken(),
            )

    def _has_gradient(self) -> bool:
        model = self.training.model()
        return model is not None and any(p.grad is not None for p in model.parameters())

    def _gradients_are_broken(self) -> bool:
        """Return True if a gradient holds NaN or Inf; waits for the device, once.

        For these a script may skip its steps.
        """
        model = self.training.model()
        gradients = [] if model is None else [p.grad.detach() for p in model.parameters() if p.grad is not None]
        return any(not bool(torch.isfinite(g).all()) for g in gradients if g.layout == torch.strided and not g.is_meta)


def _all_parameters(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return a model's parameters, and those of modules in plain lists and dicts of it, which torch does not see."""
    if model is None:
        return []
    found: dict[int, tuple[str, Tensor]] = {id(p): (clean(name), p) for name, p in model.named_parameters()}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            at = f"{clean(name)}.{attribute}".removeprefix(".")
            for inner, p in _parameters_in(cast("Any", value)):
                found.setdefault(id(p), (f"{at}{inner}", p))
    return list(found.values())


def _parameters_in(kept: Mapping[object, object] | Sequence[object]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in a list or dict, each with its place."""
    items = kept.items() if isinstance(kept, Mapping) else enumerate(kept)
    for key, item in itertools.islice(items, _MOST_KEPT):
        if isinstance(item, nn.Module):
            yield from ((f"[{key}].{name}", p) for name, p in item.named_parameters())
        elif isinstance(item, nn.Parameter):
            yield f"[{key}]", item
