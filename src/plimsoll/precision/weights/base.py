"""What every optimizer over 16-bit weights shares: it wraps any torch optimizer, which steps float32 values instead.

The inner optimizer's groups hold, in the place of each 16-bit parameter, a float32 one (`Pair`); other parameters stay.
Groups and state are the inner optimizer's own, so that a learning rate set on either is set on both.

A step opens as many parameters at a time as `chunk_bytes` allow, lets the inner optimizer step just these, and closes
them: the float32 values of the others take no memory meanwhile. That asks two things of the inner optimizer: it treats
each parameter by itself, and counts steps with the parameter, not with the group. So do all of torch's but LBFGS; a
group that changes in the step of a chunk is an error. The hooks of the inner optimizer's step run once.

The file is longer than most, since one class has to answer all that schedulers, scalers and users ask of an optimizer.
"""

import abc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.precision.weights.groups import bare_step, only, put_state, swapped
from plimsoll.precision.weights.pair import Pair, Scratch, chunks
from plimsoll.precision.weights.stores import Entry, Store
from plimsoll.rounding.dtensors import is_sharded

CHUNK_BYTES = 1 << 24
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_OURS = ("masters", "steps", "seed")  # the keys of a state dict that are not the inner optimizer's
_DTYPES = (torch.float16, torch.bfloat16)


class SixteenBitOptimizer(Optimizer, abc.ABC):
    """An optimizer over 16-bit weights, around any torch optimizer, which steps float32 values in their place."""

    update: ClassVar[str]  # how a step reaches the weights, for watches: "masters", "stochastic" or "kahan"

    def __init__(self, optimizer: Optimizer, chunk_bytes: int) -> None:
        self.operation = type(self).__name__
        check_optimizer(self.operation, optimizer, chunk_bytes)
        self.optimizer, self.chunk_bytes = optimizer, chunk_bytes
        self.steps = 0
        self._pairs: dict[int, Pair] = {}  # by the identity of the float32 parameter
        self._scratch = Scratch()
        self._factor: Tensor | None = None  # what clipping has found, for gradients that are not collected
        self.__setstate__({})  # torch's own way to the hooks of an optimizer whose groups exist already
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in _DTYPES]
        if not weights:
            found = sorted({str(p.dtype) for group in optimizer.param_groups for p in group["params"]})
            raise ArgumentError(
                f"{self.operation}: expected an optimizer of float16 or bfloat16 parameters; got {', '.join(found)}. "
                "Cast the model first, model.to(torch.bfloat16), and make the optimizer of its parameters."
            )
        for weight in weights:
            refuse_sharded(self.operation, weight)
        stores = [self._new_store(weight) for weight in weights]  # all are checked before anything changes
        self._take(dict(zip(weights, stores, strict=True)))

    @abc.abstractmethod
    def _new_store(self, weight: Tensor) -> Store:
        """What keeps the parameter's float32 value, or an error if this optimizer cannot take the parameter."""

    def _take(self, stores: dict[Tensor, Store]) -> None:
        for weight, store in stores.items():
            pair = Pair(weight, store)
            self._pairs[id(pair.master)] = pair
            put_state(self.optimizer, weight, pair.master)
        self._tell_watches()

    def _tell_watches(self) -> None:
        """Lets a watch find the weights behind the masters; in no copy and no pickle of an optimizer."""
        myself = weakref.ref(self)
        told: Any = self.optimizer
        told.plimsoll_update = self.update
        told.plimsoll_masters = lambda: [] if (it := myself()) is None else [(p.master, p.weight) for p in it.pairs]

    # -- groups and state are the inner optimizer's --------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups: their ``params`` are the float32 masters, and what is no 16-bit parameter."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]  (a property stands in for the attribute)
        self, groups: list[dict[str, Any]]
    ) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state, by float32 parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  (likewise)
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optimizer.defaults

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """The 16-bit parameters and their masters, in the groups' order."""
        return tuple(self._pairs.values())

    @property
    def nbytes(self) -> int:
        """Bytes kept beside the weights for them: masters, low bits or compensation.

        The optimizer's state comes on top, and on a CPU the memory of what is open in a step, `chunk_bytes` as a rule.
        """
        return sum(x.nbytes for pair in self.pairs for x in pair.store.kept)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of the model's parameters, 16-bit or not, to the inner optimizer."""
        known = {id(pair.weight) for pair in self.pairs}
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, Tensor) else list(listed)
        given: list[Any] = [p[1] if isinstance(p, tuple) else p for p in listed]
        if any(id(p) in known for p in given):
            raise ArgumentError(
                f"{self.operation}.add_param_group: expected parameters that no group has; got one that is in a group. "
                "Give each parameter once."
            )
        weights = [p for p in given if isinstance(p, Tensor) and p.dtype in _DTYPES]
        for weight in weights:
            refuse_sharded(self.operation, weight)
        stores = {weight: self._new_store(weight) for weight in weights}
        self.optimizer.add_param_group({**param_group, "params": listed})
        self._take(stores)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Makes the float32 masters' gradients of the model's 16-bit ones, for all parameters.

        Scalers and clipping then work on `param_groups`. It is free to ask again: only gradients that have changed are
        taken anew. Without it, `step` does the same for some parameters at a time, which needs less memory. The model's
        gradients stay until `zero_grad`.
        """
        for pair in self.pairs:
            pair.collect(self._factor)
        self._factor = None

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients in float32, which are scaled down so that it is `max_norm` at most.

        The same numbers as ``collect_gradients()`` and ``torch.nn.utils.clip_grad_norm_`` of the masters, without their
        memory: the factor is applied as `step` converts the gradients. Where there are no gradients, 0.
        """
        if not max_norm > 0:
            raise ArgumentError(
                f"{self.operation}.clip_gradients: expected max_norm above zero; got max_norm={max_norm}. "
                "Use float('inf') to have the norm alone."
            )
        found = [(p, self._gradient(p)) for p in self._parameters()]
        grads = [g for _, g in found if g is not None]
        total = total_norm(grads, norm_type, self._factor)
        factor = (max_norm / (total + _CLIP_EPSILON)).clamp(max=1.0)
        own = [g for p, g in found if g is not None and (g is p.grad)]
        for g in own:
            g.mul_(factor.to(g.device))
        if len(own) < len(grads):
            self._factor = factor if self._factor is None else self._factor * factor
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the model's gradients, as torch does, and drops the masters'."""
        for pair in self.pairs:
            pair.forget()
        with swapped(self.optimizer, {id(pair.master): pair.weight for pair in self.pairs}):
            self.optimizer.zero_grad(set_to_none)
        self._factor = None

    def _gradient(self, p: Tensor) -> Tensor | None:
        pair = self._pairs.get(id(p))
        return p.grad if pair is None else pair.gradient

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Steps the float32 values, and writes the model's 16-bit weights. Parameters without a gradient stay.

        A closure is called once, before.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_changed(self.operation, self.pairs)
        self._with_hooks(self._step_in_chunks)
        self._end_step()
        return loss

    def _with_hooks(self, step: Callable[..., Any], *args: Any) -> Any:
        """The step between the inner optimizer's hooks: those behind it find the weights written."""
        result = Optimizer.profile_hook_step(step)(self.optimizer, *args)
        # What a scheduler that was made with the inner optimizer looks for.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        return result

    def _step_in_chunks(self, optimizer: Optimizer) -> None:
        stepped = [p for p in self._parameters() if self._gradient(p) is not None]
        for chunk in chunks(stepped, self._pairs, self.chunk_bytes):
            pairs = {number: pair for number, pair in enumerate(self.pairs) if id(pair.master) in chunk}
            self._scratch.start(sum(pair.open_bytes for pair in pairs.values() if pair.weight.is_cpu))
            try:
                for pair in pairs.values():
                    pair.open(self._factor, self._scratch)
                with only(self.operation, optimizer, chunk):
                    bare_step(optimizer)
                for number, pair in pairs.items():
                    pair.close(self._key(number))
            finally:
                for pair in pairs.values():
                    pair.shut()

    def _end_step(self) -> None:
        self.steps += 1
        self._factor = None

    def _key(self, number: int) -> int:  # noqa: ARG002  (what overrides it needs the number)
        """The key of the noise that rounds the parameter of that number in this step."""
        return 0

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state, and under ``masters`` what the float32 values are made of, by parameter index.

        Tensors are references, not copies: save them before the next step. It holds the weights too, and so does not
        depend on the model's own checkpoint; ``torch.save`` of both in one file writes them once.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.optimizer.state_dict(), "masters": entries_of(self._numbered()), "steps": self.steps}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` of this or any other optimizer over 16-bit weights gave, exactly.

        The checkpoint's masters win: the model's weights are written from them, whatever was loaded into the model. To
        start from other weights instead, load them into the model after this, and call `take_model_weights`.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        pairs = self._numbered()
        entries = checked_entries(f"{self.operation}.load_state_dict", state_dict, pairs)
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k not in _OURS})
        for number, pair in pairs.items():
            pair.forget()
            pair.store.load(pair.weight.detach(), entries[number])
            pair.settle()
        self.steps, self._factor = int(state_dict["steps"]), None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def take_model_weights(self) -> None:
        """Takes the model's weights as they are as the float32 values, after loading others into the model, say."""
        for pair in self.pairs:
            pair.store.restart(pair.weight.detach())
            pair.settle()

    @torch.no_grad()
    def master_of(self, weight: Tensor) -> Tensor:
        """A copy of the float32 value of one of the model's parameters."""
        for pair in self.pairs:
            if pair.weight is weight:
                return pair.store.peek(weight.detach())
        raise ArgumentError(
            f"{self.operation}.master_of: expected a 16-bit parameter of this optimizer; got a tensor of "
            f"{weight.dtype}, shape {tuple(weight.shape)}. Give the parameter itself, not a copy."
        )

    @torch.no_grad()
    def unwrap(self) -> Optimizer:
        """The inner optimizer, with the model's own parameters in its groups again; its state stays as it is.

        Take the float32 values first (`master_of`), if they are wanted. This object is of no more use.
        """
        for pair in self.pairs:
            pair.forget()
            put_state(self.optimizer, pair.master, pair.weight, dtype=None)
        self._pairs.clear()
        told: Any = self.optimizer
        del told.plimsoll_masters, told.plimsoll_update
        return self.optimizer

    def __getstate__(self) -> dict[str, Any]:
        """All but what hooks and schedulers have put here, as of any torch optimizer."""
        ours = {name: value for name, value in self.__dict__.items() if name not in {"step", "_pairs", "_scratch"}}
        hooks = {name for name in ours if name.endswith("_hooks") or name.startswith(("_opt_called", "_zero_grad"))}
        return {name: value for name, value in ours.items() if name not in hooks} | {"_pairs": list(self.pairs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(pairs := state.get("_pairs"), list):
            state = {
                **state,
                "_scratch": Scratch(),
                "_pairs": {id(pair.master): pair for pair in cast("list[Pair]", pairs)},
            }
        super().__setstate__(state)
        if "optimizer" in state:
            self._tell_watches()

    def __repr__(self) -> str:
        return f"{self.operation} of {self.optimizer!r}"

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _numbered(self) -> dict[int, Pair]:
        """The pairs by the index that their parameters have in a state dict."""
        found = ((number, self._pairs.get(id(p))) for number, p in enumerate(self._parameters()))
        return {number: pair for number, pair in found if pair is not None}


def entries_of(pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """What each parameter's store keeps, by the parameter's index."""
    return {number: pair.store.entry(pair.weight) for number, pair in pairs.items()}


def checked_entries(operation: str, state_dict: Mapping[str, Any], pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """The entries of a state dict, if they are for these parameters."""
    entries: dict[int, Entry] | None = state_dict.get("masters")
    if entries is None:
        raise ArgumentError(
            f"{operation}: expected a state dict with masters; got the keys {', '.join(map(str, state_dict))}. It is "
            "an inner optimizer's: load it with .optimizer.load_state_dict(), and call take_model_weights()."
        )
    mine = {number: tuple(pair.weight.shape) for number, pair in pairs.items()}
    theirs = {number: tuple(next(iter(entry.values())).shape) for number, entry in entries.items()}
    wrong = sorted(number for number in {*mine, *theirs} if mine.get(number) != theirs.get(number))
    if wrong:
        raise ArgumentError(
            f"{operation}: expected masters of the shapes of this optimizer's 16-bit parameters; got others for the "
            f"parameters {wrong[:5]}, the first of shape {theirs.get(wrong[0])} where this one has "
            f"{mine.get(wrong[0])}. Make the optimizer of the same parameters, in the same groups and order."
        )
    return entries


def refuse_changed(operation: str, pairs: Sequence[Pair]) -> None:
    """Raises if the model's gradients are others than those that were collected."""
    changed = sum(pair.changed for pair in pairs)
    if changed:
        raise ArgumentError(
            f"{operation}.step: expected the model's gradients as collect_gradients() found them; got {changed} that "
            "changed since. Collect after the last backward, and change the masters' gradients (of param_groups), not "
            "the model's."
        )


def check_optimizer(operation: str, optimizer: object, chunk_bytes: int) -> None:
    """Raises if the optimizer cannot be wrapped."""
    if not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            f"{operation}: expected a torch.optim.Optimizer; got {type(optimizer).__name__}. "
            "Make the optimizer of the model's 16-bit parameters first."
        )
    if optimizer.defaults.get("differentiable"):
        raise ArgumentError(
            f"{operation}: expected an optimizer whose step is not differentiable, since rounding weights to 16 bits "
            "has no gradient; got differentiable=True. Leave it out."
        )
    if chunk_bytes <= 0:
        raise ArgumentError(f"{operation}: expected chunk_bytes above zero; got chunk_bytes={chunk_bytes}.")


def refuse_sharded(operation: str, weight: Tensor) -> None:
    """Raises for a DTensor."""
    if is_sharded(weight):
        raise UnsupportedTensorError(
            f"{operation}: expected parameters that are whole on each rank; got a DTensor of {weight.dtype}. Keep the "
            "sharded parameters in float32 and give fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            f"{weight.dtype})): the shards are then the masters."
        )


def total_norm(grads: Sequence[Tensor], norm_type: float, factor: Tensor | None) -> Tensor:
    """The norm over all, each brought to float32 for its own, 16-bit ones times the factor; 0 of none.

    As ``torch.nn.utils.get_total_norm`` of the gradients in float32.
    """
    if not grads:
        return torch.zeros(())
    norms = [_norm(g, norm_type, factor) for g in grads]
    return _vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)


def _norm(g: Tensor, norm_type: float, factor: Tensor | None) -> Tensor:
    narrow = g.element_size() < 4
    wide = g.to(torch.float32) if narrow else g
    if wide.is_sparse:
        wide = wide.coalesce().values()
    if narrow and factor is not None:
        wide = wide * factor.to(g.device)
    return _vector_norm(wide, norm_type)


def _vector_norm(x: Tensor, norm_type: float) -> Tensor:
    linalg: Any = torch.linalg
    return linalg.vector_norm(x, norm_type)
