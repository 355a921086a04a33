"""Settings of a watch, checked once: collections, intervals, names and bounds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import nn

from plimsoll import tensor_collections
from plimsoll.errors import ArgumentError

COLLECTIONS = tensor_collections.NAMES
FACTS = ("loss", "scale", "nonfinite")
BLOCKED = tuple(c.name for c in tensor_collections.COLLECTIONS if c.supports_blocks)
BLOCKS = (16, 32)  # NVFP4's block length, and MX's
SHADOWED = tuple(c.name for c in tensor_collections.COLLECTIONS if c.is_shadowed)
_BOUNDS = ("max_tensors", "max_bytes", "queue_bytes")
Pattern = str | type[nn.Module]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The arguments of `watch`, in one form."""

    intervals: Mapping[str, int]  # collection -> every so many steps
    include: tuple[Pattern, ...] | None = None
    exclude: tuple[Pattern, ...] = ()
    warmup: int = 0
    shadow_every: int | None = None
    recorder: tuple[str, ...] = FACTS
    recorder_steps: int = 50
    ranks: Literal["each", "reduce"] = "each"
    max_tensors: int = 100_000
    max_bytes: int = 1 << 30
    queue_bytes: int = 64 << 20
    block: int = 0  # length of the blocks that are recorded; 0 for none

    def block_of(self, collection: str) -> int:
        """The block length that a collection is measured with; 0 for none."""
        return self.block if collection in BLOCKED else 0

    @property
    def recorded(self) -> tuple[str, ...]:
        """The collections that the flight recorder keeps at every step."""
        return tuple(name for name in self.recorder if name in COLLECTIONS)

    def due(self, collection: str, step: int, number: int | None = None) -> bool:
        """Return True if the schedule asks for the collection at that step.

        `number` is what the collection's turn counts (see `turns`).
        """
        every, number = self.intervals.get(collection), step if number is None else number
        shadowed = collection in SHADOWED and self.shadows(step)
        return every is not None and (number < self.warmup or number % every == 0 or shadowed)

    def shadows(self, step: int) -> bool:
        """Return True if the step has a shadow."""
        return self.shadow_every is not None and step % self.shadow_every == 0

    def as_json(self) -> dict[str, object]:
        """The settings as the run's manifest keeps them."""
        return {
            "collect": dict(self.intervals),
            "include": None if self.include is None else [_shown(pattern) for pattern in self.include],
            "exclude": [_shown(pattern) for pattern in self.exclude],
            "warmup": self.warmup,
            "shadow_every": self.shadow_every,
            "recorder": list(self.recorder),
            "recorder_steps": self.recorder_steps,
            "ranks": self.ranks,
            "max_tensors": self.max_tensors,
            "max_bytes": self.max_bytes,
            "queue_bytes": self.queue_bytes,
            "block": self.block or None,
        }

    def stored(self, own: "Mapping[str, object] | None") -> dict[str, object]:
        """Return the settings of a run's manifest.

        Args:
            own: Settings of the training, by name. Default: none.

        Raises:
            ArgumentError: They are no mapping of names, or one has the name of a setting of the watch.
        """
        listed = self.as_json()
        if own is None:
            return listed
        if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"watch: expected settings to map names to values; got {own!r}. Write settings={{'lr': 1e-3}}."
            )
        if taken := sorted(listed.keys() & own.keys()):
            raise ArgumentError(
                f"watch: expected settings without names of the watch's own; got {', '.join(taken)}. Rename them."
            )
        return {**listed, **own}


def checked(
    *,
    every: object,
    collect: object,
    include: object,
    exclude: object,
    warmup: object,
    shadow_every: object,
    recorder: object,
    recorder_steps: object,
    ranks: object,
    max_tensors: object,
    max_bytes: object,
    queue_bytes: object,
    block: object = None,
) -> Settings:
    """The settings; `ArgumentError` names the first argument that cannot be."""
    intervals = _intervals(collect, _at_least("every", every, 1))
    return Settings(
        intervals=intervals,
        include=None if include is None else _patterns("include", include),
        exclude=() if exclude is None else _patterns("exclude", exclude),
        warmup=_at_least("warmup", warmup, 0),
        shadow_every=None if shadow_every is None else _at_least("shadow_every", shadow_every, 1),
        recorder=_names("recorder", recorder, (*FACTS, *COLLECTIONS)),
        recorder_steps=_at_least("recorder_steps", recorder_steps, 1),
        ranks=_ranks(ranks),
        max_tensors=_at_least("max_tensors", max_tensors, 1),
        max_bytes=_at_least("max_bytes", max_bytes, 1),
        queue_bytes=_at_least("queue_bytes", queue_bytes, 1),
        block=_block(block, intervals),
    )


def _intervals(collect: object, every: int) -> dict[str, int]:
    if isinstance(collect, Mapping):
        intervals = cast("Mapping[object, object]", collect)
        _names("collect", list(intervals), COLLECTIONS)
        return {str(name): _at_least(f"collect[{name!r}]", value, 1) for name, value in intervals.items()}
    return dict.fromkeys(_names("collect", collect, COLLECTIONS), every)


def _names(argument: str, given: object, known: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Iterable):
        raise ArgumentError(f"watch: expected names for {argument}; got {given!r}. Choose among {', '.join(known)}.")
    names = tuple(cast("Iterable[object]", given))
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"watch: expected {argument} to name some of {', '.join(known)}; got {name!r}. Correct or drop it."
            )
    return cast("tuple[str, ...]", names)


def _patterns(argument: str, given: object) -> tuple[Pattern, ...]:
    if isinstance(given, (str, type)):
        given = (given,)
    if not isinstance(given, Iterable):
        raise ArgumentError(f"watch: expected globs or module types for {argument}; got {given!r}. Give a list.")
    patterns: list[Pattern] = []
    for pattern in cast("Iterable[object]", given):
        if isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module)):
            patterns.append(pattern)
        else:
            raise ArgumentError(
                f"watch: expected a glob over names or a type of module in {argument}; got {pattern!r}. "
                'Write "blocks.*" or nn.Linear.'
            )
    return tuple(patterns)


def _at_least(argument: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(
            f"watch: expected {argument} to be an integer of {least} or more; got {argument}={value!r}. "
            f"{'Give a whole number.' if argument in _BOUNDS else 'Intervals count optimizer steps.'}"
        )
    return value


def _ranks(value: object) -> Literal["each", "reduce"]:
    if value in ("each", "reduce"):
        return value
    raise ArgumentError(
        f'watch: expected ranks to be "each" or "reduce"; got ranks={value!r}. "each" writes one part set a rank.'
    )


def _block(value: object, intervals: Mapping[str, int]) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or value not in BLOCKS:
        raise ArgumentError(
            f"watch: expected block to be 32 (MX formats), 16 (NVFP4) or None; got block={value!r}. "
            "It is the number of values that share a scale."
        )
    if not set(BLOCKED) & set(intervals):
        raise ArgumentError(
            f"watch: expected collect to have some of {', '.join(BLOCKED)} where block is given; got "
            f"collect={list(intervals)}. Collect one of them, or leave block out."
        )
    return value


def _shown(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else f"{pattern.__module__}.{pattern.__qualname__}"
