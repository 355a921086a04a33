"""An operation's schema: the arguments that it writes, and its kind."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

# Gives memory as it is found: what is in it means nothing before it is written.
_UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize"}
# Overwrites its first argument whatever it held.
_OVERWRITES = {
    "copy", "fill", "zero", "normal", "uniform", "bernoulli", "exponential", "random", "cauchy", "log_normal",
    "geometric", "set", "_foreach_copy", "_foreach_zero",
}  # fmt: skip
# Writes arguments although its schema does not say so.
_HIDDEN = {
    "native_batch_norm": ("running_mean", "running_var"),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
}
_CASTS = {"_to_copy", "to", "copy", "_copy_from", "type_as"}
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """An operation, as its schema tells it."""

    name: str  # aten.exp
    base: str  # exp: without its namespace, and without the underscore of one that works in place
    names: tuple[str, ...]  # of the arguments
    written: frozenset[str]  # those it changes
    discarded: frozenset[str]  # those whose former values do not matter
    results: tuple[str, ...]
    view: bool
    pointwise: bool
    random: bool
    uninitialised: bool
    cast: bool
    collective: bool


@functools.lru_cache(maxsize=8192)
def facts_of(func: Any) -> Facts:
    """The facts of an operation."""
    schema = func._schema  # noqa: SLF001
    namespace, _, name = schema.name.partition("::")
    base = name.removesuffix("_") if not name.endswith("__") else name
    names = tuple(argument.name for argument in schema.arguments)
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    outs = {a.name for a in schema.arguments if a.is_out}
    overwritten = {names[0]} if base in _OVERWRITES and names and names[0] in written else set[str]()
    returns = schema.returns
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return Facts(
        name=f"{namespace}.{name}",
        base=base,
        names=names,
        written=frozenset(written.union(_HIDDEN.get(base, ()))),
        discarded=frozenset(outs | overwritten),
        results=tuple(r.name or (f"result{i}" if len(returns) > 1 else "result") for i, r in enumerate(returns)),
        view=view,
        pointwise=torch.Tag.pointwise in func.tags or base in _CASTS,
        random=torch.Tag.nondeterministic_seeded in func.tags and not _is_quiet(func),
        uninitialised=base in _UNINITIALISED,
        cast=base in _CASTS,
        collective=namespace in _COLLECTIVES,
    )


def _is_quiet(func: Any) -> bool:
    """Return True if it draws only where an argument asks for it, as attention with dropout does."""
    return any(argument.name == "dropout_p" for argument in func._schema.arguments)  # noqa: SLF001


def bound(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names."""
    return {**dict(zip(facts.names, args, strict=False)), **kwargs}
