"""Registry of the kinds of healthy training and of the faults that findings are judged by.

A kind is one function that trains through the `Training` that it gets. The decorators register it by name. `held_back`
marks those that no rule is tuned on.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.trust.training import Precision, Training

Train = Callable[[Training], None]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of sound training.

    `learns`: the last tenth of its losses has at most this share of the first tenth's mean. A kind whose loss does not
    fall by learning (adversaries, rewards) reports a measure of its own that does: `Training.measures`.
    """

    name: str
    train: Train
    held_back: bool
    learns: float

    @property
    def folder(self) -> str:
        """The set's name in paths."""
        return "healthy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A training with one planted fault.

    `named` and `misleading` are patterns, searched in a finding's one line (`judge.line_of`: rule, layers, meaning,
    advice and evidence). A finding that matches `named` names the cause. The run's headline, its first finding, must
    not match `misleading`, which describes other causes.
    """

    name: str
    train: Train
    held_back: bool
    precision: Precision
    every: int
    named: re.Pattern[str]
    misleading: re.Pattern[str] | None
    says: str
    tested: bool

    @property
    def folder(self) -> str:
        """The set's name in paths."""
        return "faults"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of a kind or fault."""

    kind: Kind | Fault
    precision: Precision
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.kind.name}-{self.precision}-{self.seed}"


KINDS: dict[str, Kind] = {}
FAULTS: dict[str, Fault] = {}


def healthy(name: str, *, held_back: bool = False, learns: float = 0.5) -> Callable[[Train], Train]:
    """Register a kind of sound training."""

    def register(train: Train) -> Train:
        _unused(name, KINDS)
        KINDS[name] = Kind(name=name, train=train, held_back=held_back, learns=learns)
        return train

    return register


def fault(
    name: str,
    *,
    named: str,
    misleading: str | None = None,
    precision: Precision = "fp32",
    every: int = 10,
    held_back: bool = False,
    tested: bool = False,
) -> Callable[[Train], Train]:
    """Register a planted fault; case does not matter to the patterns. The test suite has the `tested` ones too."""

    def register(train: Train) -> Train:
        _unused(name, FAULTS)
        FAULTS[name] = Fault(
            name=name,
            train=train,
            held_back=held_back,
            precision=precision,
            every=every,
            named=re.compile(named, re.IGNORECASE),
            misleading=None if misleading is None else re.compile(misleading, re.IGNORECASE),
            says=(train.__doc__ or "").split("\n")[0],
            tested=tested,
        )
        return train

    return register


def tenth() -> list[Case]:
    """Return the healthy runs that the test suite has: a tenth, of all kinds and precisions, none held back."""
    known = [case for case in cases("healthy") if not case.kind.held_back]
    kinds = len({case.kind.name for case in known})
    # Every fifth, and others in each precision and of each seed.
    return [case for place, case in enumerate(known) if (place + 2 * (place // kinds)) % 5 == 0]


def cases(which: Literal["healthy", "faults", "all"] = "all") -> Iterator[Case]:
    """Every run of the sets: healthy kinds with each seed in each precision, FP32 first; faults once."""
    if which != "faults":
        for seed in SEEDS:
            for precision in PRECISIONS:
                for kind in KINDS.values():
                    yield Case(kind=kind, precision=precision, seed=seed)
    if which != "healthy":
        for each in FAULTS.values():
            yield Case(kind=each, precision=each.precision, seed=0)


def _unused(name: str, registered: Mapping[str, object]) -> None:
    if name in registered:
        raise ValueError(f"a kind of another name was expected; {name!r} is registered")
