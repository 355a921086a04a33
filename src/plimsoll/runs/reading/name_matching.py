"""Finding names: by themselves first, then as globs; and the nearest ones where there is none."""

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from plimsoll.errors import NotRecordedError


def matching(names: Iterable[str], pattern: str | None) -> list[str]:
    """The names that a pattern means: the one that it is, or else those it matches as a glob; all for None."""
    listed = list(names)
    if pattern is None:
        return listed
    return [pattern] if pattern in listed else fnmatch.filter(listed, pattern)


def unknown(operation: str, what: str, name: str, names: Sequence[str], *, closed: bool = True) -> NotRecordedError:
    """The error for a name that is not there, with the nearest ones; for a run that is `closed`, or written still."""
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or sorted(names)[:3]
    listed = ", ".join(repr(n) for n in near)
    advice = f"The nearest are {listed}." if near else "Nothing of this kind was recorded."
    if not closed:
        advice += " The run is open: its writer writes every few seconds, so call Run.refresh() and ask again."
    return NotRecordedError(f"{operation}: expected {what} that was recorded; got {name!r}. {advice}")
