"""Manifest of one rank: `run.json` for rank 0, `run-r00001.json` and so on.

It is JSON and replaced as a whole. It contains what parts cannot: schema and package versions, settings, the registered
series, and the sessions (the lifetime of one writer each). A session that starts at a step that an earlier one had
passed has `from_step`: in parts whose flushes came before `first_flush`, rows from that step on are replaced, and
readers leave them out.
"""

import functools
import importlib.metadata
import json
import os
import platform
import re
import socket
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from plimsoll.errors import PlimsollError, RunError
from plimsoll.formats import get_element
from plimsoll.results import as_data
from plimsoll.runs.columns.schema import SCHEMA, Series
from plimsoll.runs.storage import atomic_files, parts as _parts
from plimsoll.runs.storage.limits import MANIFEST_BYTES, RANGES, DamageError, check_depth, from_json, shown, whole
from plimsoll.runs.storage.parts import Part
from plimsoll.version import __version__

_NAME = re.compile(r"run(?:-r(\d+))?\.json")
RESERVED = frozenset(
    {"plimsoll", "schema", "versions", "created", "closed", "rank", "world_size", "settings", "thin", "dropped"}
    | {"sessions", "ranks_merged", "tensors", "parts", "lost", "checksum"}
)
_CHECKSUM = re.compile(rb',\n"checksum": "crc32:([0-9a-f]{8})"\n}\n\Z')


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Lifetime of one writer on this run and rank."""

    session: int
    started: float  # Unix seconds
    first_flush: int
    from_step: int | None = None
    pid: int = 0
    host: str = ""

    def replaces(self, part: Part) -> bool:
        """Return whether the part may hold rows that this session replaced."""
        return self.from_step is not None and part.last < self.first_flush and part.max_step >= self.from_step


def file_name(rank: int) -> str:
    """Return the name of a rank's manifest."""
    return "run.json" if rank == 0 else f"run-r{rank:05d}.json"


def rank_of(name: str) -> int | None:
    """Return the rank whose manifest has that name; None if it is no manifest."""
    match = _NAME.fullmatch(name)
    rank = -1 if match is None else int(match.group(1) or 0)
    return rank if 0 <= rank <= RANGES["rank"][1] else None


def fresh(*, rank: int, world_size: int, settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the manifest of a new run."""
    return {
        "plimsoll": "run",
        "schema": SCHEMA,
        "versions": dict(_versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "closed": None,
        "rank": rank,
        "world_size": world_size,
        "settings": as_data(settings, str),
        "thin": [],
        "dropped": {},
        "sessions": [],
        "tensors": {},
    }


def new_session(sessions: Sequence[Session], first_flush: int, from_step: int | None) -> Session:
    """Return the session of this process, numbered after the earlier ones."""
    return Session(
        session=len(sessions) + 1,
        started=datetime.now(UTC).timestamp(),
        first_flush=first_flush,
        from_step=from_step,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def read(path: Path) -> dict[str, Any]:
    """Return the content of a manifest. Errors are those of `parsed`, and `OSError`."""
    return parsed(atomic_files.read(path, MANIFEST_BYTES), str(path))


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """Return a manifest's content from its text; `where` names the file in messages.

    Raises a `RunError` if it has a newer schema, and a `DamageError` if no writer has written it.
    """
    content: Any = from_json(text, MANIFEST_BYTES)
    if not isinstance(content, dict):
        raise DamageError("no manifest of a run")
    manifest = cast("dict[str, Any]", content)
    schema = whole(manifest.get("schema"), "schema", "schema")
    if schema > SCHEMA:
        raise RunError(
            f"Run: expected a run of schema {SCHEMA} or older; got schema={schema} in {where}. "
            "Install the plimsoll that wrote it, or a newer one."
        )
    for name, value in manifest.items():
        if name in _CHECKS:
            _CHECKS[name](value, name)
        elif name != "tensors":
            check_depth(value, name)
    return manifest


def check_rank(content: Mapping[str, Any], rank: int) -> None:
    """Check that a manifest belongs to the rank in its file name."""
    if content.get("rank", rank) != rank:
        raise DamageError(f"it is of rank {content['rank']}")


def is_as_written(text: bytes) -> bool:
    """Return whether a manifest has the checksum of its text. Old manifests have none."""
    match = _CHECKSUM.search(text)
    if match is None:
        return b'"parts"' not in text and b'"checksum"' not in text
    return int(match.group(1), 16) == zlib.crc32(text[: match.start()])


def write(path: Path, content: Mapping[str, object]) -> None:
    """Replace a manifest. One line per entry is quick to write and easy to read."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items() if key != "checksum"]
    text = ("{\n" + ",\n".join(lines)).encode()
    with atomic_files.replacing(path) as file:
        file.write(text + b',\n"checksum": "crc32:%08x"\n}\n' % zlib.crc32(text))


def sessions_of(content: Mapping[str, Any]) -> list[Session]:
    """Return the sessions in a manifest."""
    known = {field.name for field in fields(Session)}
    entries = content.get("sessions", [])
    return [Session(**{name: value for name, value in entry.items() if name in known}) for entry in entries]


def parts_of(content: Mapping[str, Any]) -> list[Part]:
    """Return the parts in a manifest, with their rows."""
    return _listed(content, "parts")


def lost_of(content: Mapping[str, Any]) -> list[Part]:
    """Return damaged or missing parts. Later ones may cover them without their rows."""
    return _listed(content, "lost")


# A manifest lists the parts with their rows at the time of writing, so that readers notice a missing one: each listed
# part exists, or a part that covers it. Parts that are not listed are read too, since a killed writer has not listed
# its last ones. The last line is a checksum of the lines before.
def listing_of(parts: Iterable[Part]) -> dict[str, int | None]:
    """Return the manifest's entry for parts: rows by name, null if unknown."""
    return {part.name: part.rows for part in sorted(parts, key=lambda p: (p.kind, p.rank, p.first))}


def _listed(content: Mapping[str, Any], entry: str) -> list[Part]:
    listed = [(_parts.of_name(name), rows) for name, rows in content.get(entry, {}).items()]
    return [replace(part, rows=rows) for part, rows in listed if part is not None]


def series_of(content: Mapping[str, Any]) -> list[Series]:
    """Return the series in a manifest."""
    return [
        Series(collection=collection, name=name, format=entry["format"], shared=entry["shared"])
        for collection, names in content.get("tensors", {}).items()
        for name, entry in names.items()
    ]


def listing(series: Iterable[Series]) -> dict[str, dict[str, dict[str, object]]]:
    """Return the manifest's entry for series: by collection, then by name."""
    result: dict[str, dict[str, dict[str, object]]] = {}
    for s in series:
        result.setdefault(s.collection, {})[s.name] = {"format": s.format, "shared": s.shared}
    return result


def session_entries(sessions: Iterable[Session]) -> list[dict[str, object]]:
    """Return the manifest's entry for sessions."""
    return [asdict(session) for session in sessions]


@functools.cache  # each look-up parses a package's metadata: 5 ms for every run that begins
def _versions() -> Mapping[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pyarrow")}
    return {"plimsoll": __version__, "python": platform.python_version(), **libraries}


# -- what the entries must be: readers take them at their word


def _text(value: object, what: str) -> None:
    if not isinstance(value, str):
        raise DamageError(f"{what}: expected a text, got {shown(value)}")


def _text_or_none(value: object, what: str) -> None:
    if value is not None:
        _text(value, what)


def _object(value: object, what: str) -> dict[str, object]:
    result = _object_of(value, what)
    check_depth(result, what)
    return result


def _list(value: object, what: str) -> list[object]:
    if not isinstance(value, list):
        raise DamageError(f"{what}: expected a list, got {shown(value)}")
    return cast("list[object]", value)


def _number(kind: str) -> Callable[[object, str], object]:
    return lambda value, what: whole(value, what, kind)


def _versions_are(value: object, what: str) -> None:
    for name, version in _object(value, what).items():
        _text(version, f"{what}.{name}")


def _counts(value: object, what: str) -> None:
    for name, count in _object(value, what).items():
        whole(count, f"{what}.{name}", "count")


def _thin_is(value: object, what: str) -> None:
    for rule in _list(value, what):
        if len(pair := _list(rule, what)) != 2:
            raise DamageError(f"{what}: expected pairs, got {shown(pair)}")
        for number in pair:
            whole(number, what, "step")


def _sessions_are(value: object, what: str) -> None:
    for entry in _list(value, what):
        session = _object(entry, what)
        whole(session.get("session"), f"{what}.session", "session")
        whole(session.get("first_flush"), f"{what}.first_flush", "flush")
        whole(session.get("pid", 0), f"{what}.pid", "pid")
        _text(session.get("host", ""), f"{what}.host")
        if session.get("from_step") is not None:
            whole(session["from_step"], f"{what}.from_step", "step")
        started, (low, high) = session.get("started"), RANGES["seconds"]
        if not isinstance(started, int | float) or not low <= started <= high:
            raise DamageError(f"{what}.started: expected Unix seconds, got {shown(started)}")


def _rank_is(value: object, what: str) -> None:
    """Check the part of the batch that this rank has."""
    for name, number in _object(value, what).items():
        if name in ("data_index", "data_parallel"):
            whole(number, f"{what}.{name}", "rank")


def _step_or_none(value: object, what: str) -> None:
    """Check for a step, for -1 (no step yet), or for null (does not apply)."""
    if value is not None and value != -1:
        whole(value, what, "step")


def _parts_are(value: object, what: str) -> None:
    for name, rows in _object(value, what).items():
        if _parts.of_name(name) is None:
            raise DamageError(f"{what}: expected names of parts, got {shown(name)}")
        if rows is not None:
            whole(rows, f"{what}: {name}", "count")


def _tensors_are(value: object, what: str) -> None:
    formats: set[str] = set()
    for collection, names in _object_of(value, what).items():
        for name, entry in _object_of(names, f"{what}.{collection}").items():
            tensor = _object_of(entry, f"{what}.{collection}.{name}")
            if not isinstance(tensor.get("format"), str) or not isinstance(tensor.get("shared"), bool):
                raise DamageError(f"{what}.{collection}.{name}: expected format and shared, got {shown(tensor)}")
            formats.add(cast("str", tensor["format"]))
    for name in formats:
        try:
            get_element(name, "Run")
        except PlimsollError as error:
            raise DamageError(f"{what}: {shown(name)} is no format") from error


def _object_of(value: object, what: str) -> dict[str, object]:
    """Return an object. Its depth is checked by the caller."""
    if not isinstance(value, dict):
        raise DamageError(f"{what}: expected an object, got {shown(value)}")
    return cast("dict[str, object]", value)


_CHECKS: Mapping[str, Callable[[object, str], object]] = {
    "schema": _number("schema"),
    "versions": _versions_are,
    "created": _text_or_none,
    "closed": _text_or_none,
    "rank": _number("rank"),
    "world_size": _number("world_size"),
    "settings": _object,
    "thin": _thin_is,
    "dropped": _counts,
    "sessions": _sessions_are,
    "ranks": _rank_is,
    "ranks_merged": _object,
    "parts": _parts_are,
    "lost": _parts_are,
    "tensors": _tensors_are,
    "model": _text,
    "root": _text,
    "tied": _object,
    "fingerprint": _text_or_none,
    "lost_after": _step_or_none,
}
