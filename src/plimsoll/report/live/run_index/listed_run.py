"""`Listed`: a run by its manifests and parts' names. No Parquet file is opened."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from plimsoll.errors import RunError
from plimsoll.report.page.answers import within
from plimsoll.report.verdicts.run_summary import unix_seconds
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage import manifest as _manifest

_LIVE_SECONDS = 300.0  # an open run that nothing was written to for so long is not called live
_LONGEST = 500  # characters of a problem
# A list of a thousand runs is kept in memory, and a manifest may hold 32 MB.
_MOST_SETTINGS, _LONGEST_SETTING = 64, 100
_LARGEST = 2**53  # integers beyond it are no numbers of JavaScript

Stamp = tuple[
    tuple[int, int, int], ...
]  # changes when something is written to a run; each entry begins with a time in ns
Setting = str | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One run of the list.

    Attributes:
        id: Path below the served folder.
        name: Name of its folder.
        path: Its folder.
        token: A text that changes whenever something was written.
        identity: What another run in its place has otherwise, by its manifest.
        last_step: The last step with records. -1: none.
        closed: Whether all writers have closed it.
        created: Unix seconds.
        modified: Unix seconds.
        tensors: Number of series.
        ranks: Number of ranks with records.
        problem: The defect of its manifest. None: there is none.
        opens: Whether it can be read nevertheless.
        settings: Settings of the writer, nested ones by names with dots, and the facts on the model.
    """

    id: str
    name: str
    path: Path
    token: str
    identity: tuple[object, ...] = ()
    last_step: int = -1
    closed: bool = False
    created: float | None = None
    modified: float = 0.0
    tensors: int = 0
    ranks: int = 0
    problem: str | None = None
    opens: bool = True
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting], hash=False)

    def is_live(self, now: float) -> bool:
        """Return whether a training seems to be writing the run."""
        return self.problem is None and not self.closed and now - self.modified < _LIVE_SECONDS


def listing_of(
    catalog: Callable[[], RunFolder], run_id: str, path: Path, root: Path, modified: float, mark: Callable[[str], str]
) -> Listed:
    """The row of a run; whatever is wrong with it costs its own row.

    `mark` says of a file in it what changes when that is replaced.
    """
    name = (path.name or str(path)).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    try:
        return _of_catalog(catalog(), run_id, name, path, modified, mark)
    except Exception as error:  # noqa: BLE001  (a manifest may hold anything, and must not cost the other rows)
        why = (
            within(str(error), root)[:_LONGEST] if isinstance(error, RunError) else f"damaged ({type(error).__name__})"
        )
        token = f"none-{modified}"
        return Listed(id=run_id, name=name, path=path, token=token, modified=modified, problem=why, opens=False)


def _of_catalog(
    catalog: RunFolder, run_id: str, name: str, path: Path, modified: float, mark: Callable[[str], str]
) -> Listed:
    manifests, head = catalog.manifests, catalog.head
    ends = [catalog.visible_end(part) for part in (*catalog.of("spectra"), *catalog.of("scalars"))]
    series = [manifest.get("tensors", {}).items() for manifest in manifests.values()]
    names = {(collection, name) for of_rank in series for collection, entries in of_rank for name in entries}
    unread = [] if head else catalog.problems
    return Listed(
        id=run_id,
        name=name,
        path=path,
        token=_token(catalog, mark),
        identity=identity_of(head),
        last_step=max(ends, default=-1),
        closed=len(manifests) >= catalog.world_size and all(m.get("closed") for m in manifests.values()),
        created=unix_seconds(head.get("created")),
        modified=modified,
        tensors=len(names),
        ranks=len(catalog.ranks),
        problem=unread[0][:_LONGEST] if unread else None,
        settings=settings_of(head),
    )


def identity_of(manifest: Mapping[str, object]) -> tuple[object, ...]:
    """Return when the run was created, and when and by which process its first session began."""
    sessions = cast("Sequence[Mapping[str, object]]", manifest.get("sessions") or [{}])
    return manifest.get("created"), sessions[0].get("started"), sessions[0].get("pid")


def settings_of(manifest: Mapping[str, object]) -> dict[str, Setting]:
    """Return a manifest's settings: numbers, truth values, short texts or None.

    >>> settings_of({"settings": {"optimizer": {"lr": 0.1}, "layers": [1, 2]}, "parameters": 10})
    {'optimizer.lr': 0.1, 'layers': '[1, 2]', 'parameters': 10}
    """
    settings = cast("Mapping[str, object]", manifest.get("settings") or {})
    facts = {name: manifest[name] for name in ("model", "parameters") if name in manifest}
    entries = [*_flat(settings, "", 2), *facts.items()]
    return {name[:_LONGEST_SETTING]: _setting(value) for name, value in entries[:_MOST_SETTINGS]}


def _flat(settings: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and depth:
            yield from _flat(cast("Mapping[str, object]", value), f"{prefix}{name}.", depth - 1)
        else:
            yield f"{prefix}{name}", value


def _setting(value: object) -> Setting:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float) and math.isfinite(value) and abs(value) <= _LARGEST:
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_SETTING else f"{text[:_LONGEST_SETTING]}\N{HORIZONTAL ELLIPSIS}"


def _token(catalog: RunFolder, mark: Callable[[str], str]) -> str:
    """A digest of all parts' names and all manifests' marks."""
    digest = hashlib.blake2s(digest_size=8)
    for part in sorted(part.name for part in catalog.parts):
        digest.update(part.encode())
    for rank in sorted(catalog.manifests):
        digest.update(f"{rank} {mark(_manifest.file_name(rank))};".encode())
    return digest.hexdigest()
