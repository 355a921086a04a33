"""Writers that are gone without having closed their run, from the sessions in its manifests."""

import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plimsoll.runs.storage import lock, manifest as _manifest
from plimsoll.runs.storage.manifest import Session

_ROUNDING_SECONDS = 2.0  # of a process's start, and of clocks


def gone_writers(manifests: Iterable[Mapping[str, Any]]) -> list[Session]:
    """Return the last session of each manifest that is not closed and whose process has ended.

    A process of another machine cannot be asked and counts as alive.
    """
    open_ones = [_manifest.sessions_of(content) for content in manifests if not content.get("closed")]
    return [sessions[-1] for sessions in open_ones if sessions and not _writes_still(sessions[-1])]


def is_here(manifest: Mapping[str, Any]) -> bool:
    """Return whether the manifest's last writer was a process of this machine."""
    sessions = _manifest.sessions_of(manifest)
    return bool(sessions) and sessions[-1].host == socket.gethostname()


def _writes_still(session: Session) -> bool:
    if session.host != socket.gethostname() or session.pid <= 0:
        return True
    if not lock.is_alive(session.pid):
        return False
    started = _started(session.pid)
    return started is None or started <= session.started + _ROUNDING_SECONDS  # else the number is another process's


def _started(pid: int) -> float | None:
    """Return when a process began, in Unix seconds; None where the system has no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
        ticks = int(stat.rpartition(")")[2].split()[19])
        return int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return None
