"""Base class of the optimizers over 16-bit weights.

It wraps any torch optimizer, which steps float32 values instead. In the inner optimizer's groups a float32 parameter
replaces each 16-bit one (`Pair`); other parameters stay. Groups and state are the inner optimizer's own, so a learning
rate set on either object is set on both.
"""

import abc
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.precision.weights.stores import Entry, Pair, Scratch, Store, chunks
from plimsoll.rounding.casting import is_sharded
from plimsoll.unit.optim.optimizers import unhooked


def put_state(optimizer: Optimizer, old: Tensor, new: Tensor, dtype: torch.dtype | None = torch.float32) -> None:
    """Replace `old` by `new` in group and state, whose tensors of its dtype are cast."""
    for group in optimizer.param_groups:
        group["params"][:] = [new if p is old else p for p in group["params"]]  # LBFGS keeps a reference to the list
    if old not in optimizer.state:
        return
    state: dict[str, Any] = optimizer.state.pop(old)
    narrow = {name for name, x in state.items() if isinstance(x, Tensor) and x.dtype == old.dtype}
    for name in narrow if dtype is not None else ():
        state[name] = state[name].to(dtype)
    if isinstance(optimizer, torch.optim.Adagrad) and float(state["step"]) == 0:
        # Adagrad creates its state with the optimizer, where it was rounded to 16 bits: set it again.
        start = next(g for g in optimizer.param_groups if any(p is new for p in g["params"]))
        state["sum"].fill_(start["initial_accumulator_value"])
    optimizer.state[new] = state


@contextmanager
def swapped(optimizer: Optimizer, others: Mapping[int, Tensor]) -> Generator[None]:
    """Put other parameters in place of those with the given ids for a while."""
    lists: list[list[Tensor]] = [group["params"] for group in optimizer.param_groups]
    for group, params in zip(optimizer.param_groups, lists, strict=True):
        group["params"] = [others.get(id(p), p) for p in params]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, lists, strict=True):
            group["params"] = params


@contextmanager
def only(operation: str, optimizer: Optimizer, chosen: Set[int]) -> Generator[None]:
    """Limit an optimizer to the parameters with these ids for a while.

    Its groups must not change meanwhile.
    """
    groups = optimizer.param_groups
    lists: list[list[Tensor]] = [group["params"] for group in groups]
    before = [_settings(group) for group in groups]
    for group, params in zip(groups, lists, strict=True):
        group["params"] = [p for p in params if id(p) in chosen]
    try:
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, lists, strict=True):
            group["params"] = params
    for old, group in zip(before, groups, strict=True):
        _refuse_counting(operation, optimizer, old, _settings(group))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a group except its parameters."""
    return {name: value for name, value in group.items() if name != "params"}


def _refuse_counting(operation: str, optimizer: Optimizer, old: dict[str, Any], new: dict[str, Any]) -> None:
    # A tensor (a learning rate) is compared by identity: comparing its value would synchronize with the device.
    other = [name for name in {*old, *new} if old.get(name) is not new.get(name)]
    changed = sorted(name for name in other if isinstance(new.get(name), Tensor) or old.get(name) != new.get(name))
    if changed:
        raise ArgumentError(
            f"{operation}.step: expected an optimizer whose groups do not change in its step, since it steps some "
            f"parameters at a time; got {type(optimizer).__name__}, which changed {', '.join(changed)}. Use "
            "MasterWeights(optimizer, compact=False)."
        )


CHUNK_BYTES = 1 << 24
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_OURS = ("masters", "steps", "seed")  # keys of a state dict that are not the inner optimizer's


class SixteenBitOptimizer(Optimizer, abc.ABC):
    """Torch optimizer over 16-bit weights that steps float32 values instead."""

    update: ClassVar[str]  # kind of update, for watches: "masters", "stochastic" or "kahan"

    def __init__(self, optimizer: Optimizer, chunk_bytes: int) -> None:
        self.operation = type(self).__name__
        check_optimizer(self.operation, optimizer, chunk_bytes)
        self.optimizer, self.chunk_bytes = optimizer, chunk_bytes
        self.steps = 0
        self._pairs: dict[int, Pair] = {}  # by id of the float32 parameter
        self._scratch = Scratch()
        self._factor: Tensor | None = None  # clipping factor that applies to gradients not yet collected
        self.__setstate__({})  # torch's own way to create the hooks of an optimizer whose groups exist already
        weights = [p for group in optimizer.param_groups for p in group["params"] if p.dtype in SIXTEEN_BIT]
        if not weights:
            dtypes = sorted({str(p.dtype) for group in optimizer.param_groups for p in group["params"]})
            raise ArgumentError(
                f"{self.operation}: expected an optimizer of float16 or bfloat16 parameters; got {', '.join(dtypes)}. "
                "Cast the model first, model.to(torch.bfloat16), and make the optimizer of its parameters."
            )
        for weight in weights:
            refuse_sharded(self.operation, weight)
        stores = [self._new_store(weight) for weight in weights]  # all are checked before anything changes
        self._take(dict(zip(weights, stores, strict=True)))

    @abc.abstractmethod
    def _new_store(self, weight: Tensor) -> Store:
        """Return a store for the parameter's float32 value, or raise."""

    def _take(self, stores: dict[Tensor, Store]) -> None:
        for weight, store in stores.items():
            pair = Pair(weight, store)
            self._pairs[id(pair.master)] = pair
            put_state(self.optimizer, weight, pair.master)
        self._announce_to_watches()

    def _announce_to_watches(self) -> None:
        """Let a watch find the weights behind the masters."""
        myself = weakref.ref(self)
        inner: Any = self.optimizer
        # Copies and pickles of the optimizer do not contain this.
        inner.plimsoll_update = self.update
        inner.plimsoll_masters = lambda: [] if (it := myself()) is None else [(p.master, p.weight) for p in it.pairs]

    # -- groups and state are the inner optimizer's --------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the inner optimizer, with masters for 16-bit parameters."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(  # pyright: ignore[reportIncompatibleVariableOverride]  (a property stands in for the attribute)
        self, groups: list[dict[str, Any]]
    ) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """State of the inner optimizer, by float32 parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]  (likewise)
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the inner optimizer."""
        return self.optimizer.defaults

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Pairs of 16-bit parameters and masters, in the groups' order."""
        return tuple(self._pairs.values())

    @property
    def nbytes(self) -> int:
        """Bytes in addition to the weights: masters, low bits or compensation.

        Not included: the optimizer's state, and on a CPU the memory of open parameters in a step, usually
            `chunk_bytes`.
        """
        return sum(x.nbytes for pair in self.pairs for x in pair.store.kept)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, 16-bit or not, to the inner optimizer."""
        known = {id(pair.weight) for pair in self.pairs}
        listed = param_group["params"]
        listed = [listed] if isinstance(listed, Tensor) else list(listed)
        added: list[Any] = [p[1] if isinstance(p, tuple) else p for p in listed]
        if any(id(p) in known for p in added):
            raise ArgumentError(
                f"{self.operation}.add_param_group: expected parameters that no group has; got one that is in a group. "
                "Give each parameter once."
            )
        weights = [p for p in added if isinstance(p, Tensor) and p.dtype in SIXTEEN_BIT]
        for weight in weights:
            refuse_sharded(self.operation, weight)
        stores = {weight: self._new_store(weight) for weight in weights}
        self.optimizer.add_param_group({**param_group, "params": listed})
        self._take(stores)

    # -- gradients -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Copy the model's 16-bit gradients to the float32 masters, for all parameters.

        Scalers and clipping then work on `param_groups`. A repeated call costs nothing: only changed gradients are
        copied again. Without this call, `step` copies the gradients of some parameters at a time, which needs less
        memory. The model's gradients stay until `zero_grad`.
        """
        for pair in self.pairs:
            pair.collect(self._factor)
        self._factor = None

    @torch.no_grad()
    def clip_gradients(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`.

        Return the norm before, in float32. The numbers equal those of ``collect_gradients()`` and
        ``torch.nn.utils.clip_grad_norm_`` of the masters, without their memory: `step` applies the factor when it
        converts the gradients. Without gradients the norm is 0.

        Args:
            max_norm: Above 0; `inf` computes the norm and clips nothing.
            norm_type: Exponent of the norm. Default: 2.
        """
        if not max_norm > 0:
            raise ArgumentError(
                f"{self.operation}.clip_gradients: expected max_norm above zero; got max_norm={max_norm}. "
                "Use float('inf') to have the norm alone."
            )
        gradients = [(p, self._gradient(p)) for p in self._parameters()]
        grads = [g for _, g in gradients if g is not None]
        total = total_norm(grads, norm_type, self._factor)
        factor = (max_norm / (total + _CLIP_EPSILON)).clamp(max=1.0)
        own = [g for p, g in gradients if g is not None and (g is p.grad)]
        for g in own:
            g.mul_(factor.to(g.device))
        if len(own) < len(grads):
            self._factor = factor if self._factor is None else self._factor * factor
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the model's gradients, as torch does, and drop the masters' gradients."""
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
        """Step the float32 values, and write the model's 16-bit weights.

        Parameters without a gradient stay. A closure is called once, before the step.
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
        """Run the step between the inner optimizer's hooks."""
        # Hooks after the step find the written weights.
        result = Optimizer.profile_hook_step(step)(self.optimizer, *args)
        # A scheduler made with the inner optimizer checks this flag.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001
        return result

    # A step opens as many parameters at a time as `chunk_bytes` allow, lets the inner optimizer step only these, and
    # closes them. The float32 values of the others take no memory meanwhile. This requires that the inner optimizer
    # treats each parameter by itself, and counts steps per parameter and not per group. All of torch's optimizers but
    # LBFGS do so. A group that changes during the step of a chunk is an error. Hooks of the inner optimizer's step run
    # once per step.
    def _step_in_chunks(self, optimizer: Optimizer) -> None:
        stepped = [p for p in self._parameters() if self._gradient(p) is not None]
        for chunk in chunks(stepped, self._pairs, self.chunk_bytes):
            pairs = {number: pair for number, pair in enumerate(self.pairs) if id(pair.master) in chunk}
            self._scratch.start(sum(pair.open_bytes for pair in pairs.values() if pair.weight.is_cpu))
            try:
                for pair in pairs.values():
                    pair.open(self._factor, self._scratch)
                with only(self.operation, optimizer, chunk):
                    unhooked(type(optimizer))(optimizer)
                for number, pair in pairs.items():
                    pair.close(self._key(number))
            finally:
                for pair in pairs.values():
                    pair.shut()

    def _end_step(self) -> None:
        self.steps += 1
        self._factor = None

    def _key(self, number: int) -> int:  # noqa: ARG002  (what overrides it needs the number)
        """Return the key of the rounding noise of one parameter in this step."""
        return 0

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, and the float32 values in ``masters``.

        Their keys are parameter indices. Tensors are references, not copies: save them before the next step. The
        weights are included, so the state does not depend on the model's own checkpoint. ``torch.save`` of both in one
        file writes them once.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.optimizer.state_dict(), "masters": entries_of(self._numbered()), "steps": self.steps}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the `state_dict` of any optimizer over 16-bit weights, exactly.

        The masters of the checkpoint overwrite the model's weights, whatever was loaded into the model. To start from
        other weights instead, load them into the model after this, and call `take_model_weights`.
        """
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        pairs = self._numbered()
        entries = checked_entries(f"{self.operation}.load_state_dict", state_dict, pairs)
        steps = int(state_dict["steps"])  # before anything is changed
        self.optimizer.load_state_dict({k: v for k, v in state_dict.items() if k not in _OURS})
        for number, pair in pairs.items():
            pair.forget()
            pair.store.load(pair.weight.detach(), entries[number])
            pair.settle()
        self.steps, self._factor = steps, None
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def take_model_weights(self) -> None:
        """Set the float32 values to the model's present weights."""
        for pair in self.pairs:
            pair.store.restart(pair.weight.detach())
            pair.settle()

    @torch.no_grad()
    def master_of(self, weight: Tensor) -> Tensor:
        """Return a copy of the float32 value of one of the model's parameters."""
        for pair in self.pairs:
            if pair.weight is weight:
                return pair.store.peek(weight.detach())
        raise ArgumentError(
            f"{self.operation}.master_of: expected a 16-bit parameter of this optimizer; got a tensor of "
            f"{weight.dtype}, shape {tuple(weight.shape)}. Give the parameter itself, not a copy."
        )

    @torch.no_grad()
    def unwrap(self) -> Optimizer:
        """Return the inner optimizer with the model's own parameters.

        Its state stays as it is. Take the float32 values first (`master_of`) if you need them. This object cannot be
        used afterwards.
        """
        for pair in self.pairs:
            pair.forget()
            put_state(self.optimizer, pair.master, pair.weight, dtype=None)
        self._pairs.clear()
        inner: Any = self.optimizer
        del inner.plimsoll_masters, inner.plimsoll_update
        return self.optimizer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without additions of hooks and schedulers, as torch does."""
        ours = {name: value for name, value in self.__dict__.items() if name not in {"step", "_pairs", "_scratch"}}
        hooks = {name for name in ours if name.endswith("_hooks") or name.startswith(("_opt_called", "_zero_grad"))}
        return {name: value for name, value in ours.items() if name not in hooks} | {"_pairs": list(self.pairs)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(pairs := state.get("_pairs"), list):
            by_id = {id(pair.master): pair for pair in cast("list[Pair]", pairs)}
            state = {**state, "_scratch": Scratch(), "_pairs": by_id}
        super().__setstate__(state)
        if "optimizer" in state:
            self._announce_to_watches()

    def __repr__(self) -> str:
        return f"{self.operation} of {self.optimizer!r}"

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _numbered(self) -> dict[int, Pair]:
        """Return the pairs by the index of their parameters in a state dict."""
        pairs = ((number, self._pairs.get(id(p))) for number, p in enumerate(self._parameters()))
        return {number: pair for number, pair in pairs if pair is not None}


def entries_of(pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """Return the checkpoint entry of each parameter's store, by the parameter's index."""
    return {number: pair.store.entry(pair.weight) for number, pair in pairs.items()}


def checked_entries(operation: str, state_dict: Mapping[str, Any], pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """Return the masters of a state dict; raise unless they fit these parameters."""
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
    """Raise if the model's gradients changed after they were collected."""
    changed = sum(pair.changed for pair in pairs)
    if changed:
        raise ArgumentError(
            f"{operation}.step: expected the model's gradients as collect_gradients() found them; got {changed} that "
            "changed since. Collect after the last backward, and change the masters' gradients (of param_groups), not "
            "the model's."
        )


def check_optimizer(operation: str, optimizer: object, chunk_bytes: int) -> None:
    """Raise if the optimizer cannot be wrapped."""
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
    integer(operation, "chunk_bytes", chunk_bytes, low=1, remedy="Leave it out for 16 MiB.")


def refuse_sharded(operation: str, weight: Tensor) -> None:
    """Raise for a DTensor."""
    if is_sharded(weight):
        raise UnsupportedTensorError(
            f"{operation}: expected parameters that are whole on each rank; got a DTensor of {weight.dtype}. Keep the "
            "sharded parameters in float32 and give fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype="
            f"{weight.dtype})): the shards are then the masters."
        )


def total_norm(grads: Sequence[Tensor], norm_type: float, factor: Tensor | None) -> Tensor:
    """Return the norm of all gradients in float32, 16-bit ones times the factor.

    The result equals ``torch.nn.utils.get_total_norm`` of the gradients in float32. Gradients are widened one at a
    time.
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


_vector_norm: Callable[..., Tensor] = cast("Any", torch.linalg).vector_norm  # torch leaves its type open
