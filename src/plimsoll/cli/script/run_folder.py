"""Default folder of `plimsoll run`: ``runs/SCRIPT-DATE-TIME``, on every rank."""

import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from plimsoll.errors import ArgumentError

_KEY, _FREE_KEY = "plimsoll/run", "plimsoll/free"


# Ranks agree through the store of their process group, where the first to come writes its choice: nobody waits.
# Without a process group, the workers of one torchrun share its process, and take the time at which that began.
def choose(stem: str, start: Path) -> Path:
    """Return a folder of `start`, for the script of that name."""
    parent = start / "runs"
    dist = process_group()
    if dist is not None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        return parent / store.compare_set(_KEY, "", _dated(stem, datetime.now().astimezone())).decode()
    if dist is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return parent / _dated(stem, _launched())
    return _unused(parent / _dated(stem, datetime.now().astimezone()))


def free(folder: Path, taken: bool) -> Path:
    """Return the folder, or a numbered one if it is taken; the same on every rank."""
    dist = process_group()
    if dist is not None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        return Path(store.compare_set(_FREE_KEY, "", str(_unused(folder) if taken else folder)).decode())
    if taken and dist is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ArgumentError(
            "run: expected a folder without a run for several ranks that have no process group; got "
            f"--output {folder}. Name a new folder, or continue that run with --resume."
        )
    return _unused(folder) if taken else folder


def process_group() -> Any:
    """`torch.distributed` where the script has set up its process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _dated(stem: str, when: datetime) -> str:
    return f"{stem}-{when:%Y%m%d-%H%M%S}"


def _unused(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _launched() -> datetime:
    """Return when the launcher of the ranks was started; all ranks find the same."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    status = Path(f"/proc/{os.getppid()}/stat")
    if not one_machine or "TORCHELASTIC_RUN_ID" not in os.environ or not status.exists():
        raise ArgumentError(
            "run: expected --output, or ranks that can agree on a folder; got several ranks, without a process group "
            "when training began, that are not of one torchrun on one machine. Give --output DIR."
        )
    # proc(5): the 22nd field, counted behind the command's name, which may hold anything.
    ticks = int(status.read_text().rpartition(")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
    return datetime.fromtimestamp(int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")).astimezone()
