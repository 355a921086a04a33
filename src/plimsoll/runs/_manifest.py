"""The manifest of one rank: `run.json` for rank 0, `run-r00001.json` and so on for the others. JSON, replaced whole.

It says what parts cannot: schema and package versions, settings, the registered series, and the sessions, each one
writer's life. A session that starts at a step which an earlier one had passed has `from_step`: rows at that step and
after it in parts whose flushes came before `first_flush` are replaced, so readers leave them out.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from plimsoll._version import __version__
from plimsoll.errors import RunError
from plimsoll.runs import _files
from plimsoll.runs._parts import Part
from plimsoll.runs._tables import SCHEMA, Series

_NAME = re.compile(r"run(?:-r(\d+))?\.json")
RESERVED = frozenset(
    {"plimsoll", "schema", "versions", "created", "closed", "rank", "world_size", "settings", "thin", "dropped"}
    | {"sessions", "ranks_merged", "tensors"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One writer's life on this run and rank."""

    session: int
    started: float  # Unix seconds
    first_flush: int
    from_step: int | None = None
    pid: int = 0
    host: str = ""

    def replaces(self, part: Part) -> bool:
        """Whether the part may hold rows that this session replaced: those at `from_step` and after."""
        return self.from_step is not None and part.last < self.first_flush and part.max_step >= self.from_step


def file_name(rank: int) -> str:
    """The name of a rank's manifest."""
    return "run.json" if rank == 0 else f"run-r{rank:05d}.json"


def rank_of(name: str) -> int | None:
    """The rank whose manifest bears that name; None if it is none."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found.group(1) or 0)


def fresh(*, rank: int, world_size: int, settings: Mapping[str, object]) -> dict[str, Any]:
    """The manifest of a run that begins."""
    return {
        "plimsoll": "run",
        "schema": SCHEMA,
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "closed": None,
        "rank": rank,
        "world_size": world_size,
        "settings": plain(settings),
        "thin": [],
        "dropped": {},
        "sessions": [],
        "tensors": {},
    }


def new_session(sessions: Sequence[Session], first_flush: int, from_step: int | None) -> Session:
    """The session of this process, numbered after those before it."""
    return Session(
        session=len(sessions) + 1,
        started=datetime.now(UTC).timestamp(),
        first_flush=first_flush,
        from_step=from_step,
        pid=os.getpid(),
        host=socket.gethostname(),
    )


def read(path: Path) -> dict[str, Any]:
    """A manifest's content. `RunError` for one of a newer schema; OSError or ValueError for one that cannot be read."""
    return parsed(path.read_bytes(), str(path))


def parsed(text: bytes, where: str) -> dict[str, Any]:
    """A manifest's content, of the text in its file."""
    content = json.loads(text)
    if not isinstance(content, dict) or not isinstance(schema := cast("Any", content).get("schema"), int):
        raise ValueError("no manifest of a run")  # noqa: TRY004  (damaged content, not a caller's wrong type)
    if schema > SCHEMA:
        raise RunError(
            f"Run: expected a run of schema {SCHEMA} or older; got schema={schema} in {where}. "
            "Install the plimsoll that wrote it, or a newer one."
        )
    return cast("dict[str, Any]", content)


def write(path: Path, content: Mapping[str, object]) -> None:
    """Replaces a manifest: one line for each entry, which is quick to make and can be read by eye."""
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    with _files.replacing(path) as file:
        file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def sessions_of(content: Mapping[str, Any]) -> list[Session]:
    """The sessions in a manifest."""
    return [Session(**entry) for entry in content.get("sessions", [])]


def series_of(content: Mapping[str, Any]) -> list[Series]:
    """The series in a manifest."""
    return [
        Series(collection=collection, name=name, format=entry["format"], shared=entry["shared"])
        for collection, names in content.get("tensors", {}).items()
        for name, entry in names.items()
    ]


def listing(series: Iterable[Series]) -> dict[str, dict[str, dict[str, object]]]:
    """The manifest's entry for series: by collection, then by name."""
    result: dict[str, dict[str, dict[str, object]]] = {}
    for s in series:
        result.setdefault(s.collection, {})[s.name] = {"format": s.format, "shared": s.shared}
    return result


def session_entries(sessions: Iterable[Session]) -> list[dict[str, object]]:
    """The manifest's entry for sessions."""
    return [asdict(session) for session in sessions]


def plain(value: object) -> Any:
    """The same as JSON-able data: numbers that JSON lacks, and whatever else it cannot hold, as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("Iterable[object]", value)]
    return str(value)


def _versions() -> dict[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in ("torch", "numpy", "pyarrow")}
    return {"plimsoll": __version__, "python": platform.python_version(), **libraries}
