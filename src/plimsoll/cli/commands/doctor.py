"""``plimsoll doctor``: devices, kernel backends and optional packages of this machine."""

import dataclasses
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.machine import Cache, Device, Extra, Machine, examine
from plimsoll.cli.options import Json, Quiet
from plimsoll.cli.terminal import Glyphs, console, glyphs


def doctor(as_json: Json = False, _quiet: Quiet = False) -> None:
    """Show devices, kernel backends and optional packages.

    Paste its output into a bug report.
    """
    machine = examine()
    if as_json:
        messages.write_json(dataclasses.asdict(machine))
    else:
        _print(machine, console())


def _print(machine: Machine, target: Console) -> None:
    draw = glyphs(target)
    target.print(Text.assemble(("Plimsoll ", "bold"), (machine.plimsoll, "bold"), (f"  {machine.system}", "dim")))
    _section(target, "Versions", [(name, found or "not installed", "") for name, found in machine.versions.items()])
    _section(target, "Devices", [row for device in machine.devices for row in _device_rows(device)])
    if len(machine.devices) == 1:
        _note(target, "no GPU: torch sees none")
    backends = [(_mark(backend.available, draw), backend.name, backend.detail) for backend in machine.backends]
    _section(target, "Kernel backends", backends)
    _note(target, _choice(machine), style="red" if machine.backend_problem else "dim")
    _section(target, "Cache of compiled kernels", [_cache_row(machine.kernel_cache, draw)])
    _section(target, "Optional parts", [_extra_row(extra, draw) for extra in machine.extras])


def _section(target: Console, title: str, rows: Sequence[tuple[str | Text, str, str]]) -> None:
    """A heading and, below it, three columns; the last one wraps inside its column."""
    target.print()
    target.print(Text(title, style="bold"))
    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for style in (None, None, "dim"):
        grid.add_column(overflow="fold", style=style)
    for first, second, third in rows:
        # Text, not str: "[report]" in an install line is no markup.
        grid.add_row(Text.assemble("  ", first), Text(second), Text(third))
    target.print(grid)


def _note(target: Console, text: str, style: str = "dim") -> None:
    target.print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def _device_rows(device: Device) -> list[tuple[str | Text, str, str]]:
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.1f} GiB"
    hardware = ", ".join(("fp32", *device.formats))
    return [
        (Text(device.name, style="cyan"), device.model, f"{device.detail}{memory}"),
        ("", f"computes in {hardware}", f"kernels: {device.backend}"),
    ]


def _mark(good: bool, draw: Glyphs) -> Text:
    return Text(draw.present, style="green") if good else Text(draw.absent, style="yellow")


def _choice(machine: Machine) -> str:
    if machine.backend_problem:
        return machine.backend_problem
    if machine.forced_backend:
        return f"{machine.forced_backend} is forced on every device (PLIMSOLL_BACKEND)."
    return "Chosen by the tensor's device; PLIMSOLL_BACKEND=torch (or numba, triton) forces one."


def _cache_row(cache: Cache, draw: Glyphs) -> tuple[Text, str, str]:
    if cache.folder is None:
        advice = "kernels are compiled again in each process; set NUMBA_CACHE_DIR to a writable folder"
        return _mark(False, draw), "none", advice
    return _mark(cache.writable, draw), cache.folder, "" if cache.writable else "not writable"


def _extra_row(extra: Extra, draw: Glyphs) -> tuple[Text, str, str]:
    found = ", ".join(f"{package} {version}" for package, version in extra.versions.items() if version)
    return _mark(extra.install is None, draw), extra.name, extra.install or found
