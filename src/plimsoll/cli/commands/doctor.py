"""``plimsoll doctor``: devices, backends, packages, and the cost of watching."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.options import AsModule, Json, Quiet, ScriptArguments
from plimsoll.cli.script import runner
from plimsoll.cli.terminal import Glyphs, console, glyphs
from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.extras import EXTRAS, install_line
from plimsoll.formats import BLOCKS, ELEMENTS
from plimsoll.text import counted, percent
from plimsoll.version import NEWEST_TESTED_TORCH, __version__

if TYPE_CHECKING:
    from plimsoll.watch.cost import CostReport


_ROUNDS = 9


def doctor(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="With --cost: a training script. Default: a transformer.")
    ] = None,
    arguments: ScriptArguments = None,
    as_module: AsModule = False,
    cost: Annotated[bool, typer.Option("--cost", help="Measure the time that watching a training takes.")] = False,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="With --cost: rounds of 18 steps to measure. Default: 9.")
    ] = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Show devices, kernel backends and optional packages.

    Paste its output into a bug report. With --cost it trains instead, and measures the extra time of a sampled step by
    collection.
    """
    if cost:
        _measure_cost(script, arguments or [], rounds or _ROUNDS, as_module=as_module, as_json=as_json)
        return
    words = script or (f"--rounds {rounds}" if rounds else "-m" if as_module else "")
    if words:
        raise ArgumentError(f"doctor: expected --cost with {words}; got none. Put it before, or leave {words} out.")
    machine = examine()
    if as_json:
        messages.write_json(dataclasses.asdict(machine))
    else:
        _print(machine, console())


def _measure_cost(script: str | None, arguments: Sequence[str], rounds: int, *, as_module: bool, as_json: bool) -> None:
    if script is not None and not as_module:
        runner.check(script, "doctor")
    from plimsoll.cli.script.cost_session import STEPS_OF_ROUND, CostSession, measure_example

    def show(report: "CostReport") -> None:
        if as_json:
            print(json.dumps(dataclasses.asdict(report)), flush=True)  # noqa: T201  (one line, after the script's own)
        else:
            _print_cost(report, console())

    if script is not None:
        session = CostSession(rounds, show, messages.error)
        raise runner.RunAfterCli(lambda: session.run(script, arguments, as_module=as_module))
    messages.note(f"a small transformer is trained for {STEPS_OF_ROUND * (rounds + 1)} steps")
    show(measure_example(rounds))


def _print_cost(report: "CostReport", target: Console) -> None:
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    about = f"  {report.model}, {report.parameters:,} parameters, {threads}, {report.rounds} rounds"
    target.print(Text.assemble(("Cost of watching", "bold"), (about, "dim")))
    rows: list[tuple[str | Text, str, str]] = [("a step, nothing sampled", f"{report.step_seconds * 1e3:,.2f} ms", "")]
    for found in report.costs:
        of_floor = (
            ""
            if found.of_floor is None or found.name == report.costs[0].name
            else f", {found.of_floor:.2f} of the aminmax"
        )
        extra = f"{found.extra_seconds * 1e3:+,.2f} ms"
        rows.append((found.name, extra, f"{100 * found.extra:+.1f} %, spread {percent(found.spread, 1)}{of_floor}"))
    _section(target, "Extra time of a sampled step", rows)
    if report.costs[-1].spread > report.costs[-1].extra / 2:
        _note(target, "Other work disturbs these times. Repeat on a quieter machine, or with more --rounds.", "yellow")
    intervals = [
        (f"{percent(float(share))} of the time", f"every={every}", "") for share, every in report.every.items()
    ]
    _section(target, "Everything within a budget", intervals)


def _print(machine: "Machine", target: Console) -> None:
    draw = glyphs(target)
    target.print(Text.assemble(("Plimsoll ", "bold"), (machine.plimsoll, "bold"), (f"  {machine.system}", "dim")))
    _section(target, "Versions", [(name, found or "not installed", "") for name, found in machine.versions.items()])
    if _release(machine.versions["torch"] or "0.0") > _release(machine.newest_tested_torch):
        _note(target, f"the newest torch that Plimsoll was tested with is {machine.newest_tested_torch}", "yellow")
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


def _device_rows(device: "Device") -> list[tuple[str | Text, str, str]]:
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.1f} GiB"
    hardware = ", ".join(("fp32", *device.formats))
    return [
        (Text(device.name, style="cyan"), device.model, f"{device.detail}{memory}"),
        ("", f"computes in {hardware}", f"kernels: {device.backend}"),
    ]


def _mark(good: bool, draw: Glyphs) -> Text:
    return Text(draw.present, style="green") if good else Text(draw.absent, style="yellow")


def _choice(machine: "Machine") -> str:
    if machine.backend_problem:
        return machine.backend_problem
    if machine.forced_backend:
        return f"{machine.forced_backend} is forced on every device (PLIMSOLL_BACKEND)."
    return "Chosen by the tensor's device; PLIMSOLL_BACKEND=torch (or numba, triton) forces one."


def _cache_row(cache: "Cache", draw: Glyphs) -> tuple[Text, str, str]:
    if cache.folder is None:
        advice = "kernels are compiled again in each process; set NUMBA_CACHE_DIR to a writable folder"
        return _mark(False, draw), "none", advice
    return _mark(cache.writable, draw), cache.folder, "" if cache.writable else "not writable"


def _extra_row(extra: "Extra", draw: Glyphs) -> tuple[Text, str, str]:
    found = ", ".join(f"{package} {version}" for package, version in extra.versions.items() if version)
    return _mark(extra.install is None, draw), extra.name, extra.install or found


# -- the machine's facts: formats, backends and extras come from the tables of their packages --------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One processor: what it is, and which formats it computes in."""

    name: str
    model: str
    detail: str
    memory_bytes: int | None
    formats: tuple[str, ...]
    backend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One kernel backend, and whether it runs here."""

    name: str
    available: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Folder of Numba's compiled kernels; None without Numba or a writable folder."""

    folder: str | None
    writable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """One optional part, its versions, and the install line if it is incomplete."""

    name: str
    versions: Mapping[str, str | None]
    install: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that `plimsoll doctor` tells."""

    plimsoll: str
    versions: Mapping[str, str | None]
    newest_tested_torch: str
    system: str
    devices: tuple[Device, ...]
    backends: tuple[Backend, ...]
    forced_backend: str | None
    backend_problem: str | None
    kernel_cache: Cache
    extras: tuple[Extra, ...]


def examine() -> Machine:
    """Return the machine's facts. It imports torch and every backend.

    A missing or broken one is a line of its own.
    """
    from plimsoll import kernels

    forced, problem = None, None
    try:
        forced = kernels.forced()
    except PlimsollError as error:
        problem = str(error)
    packages = ("torch", "numpy", "numba", "triton", "pyarrow", "scipy")
    return Machine(
        plimsoll=__version__,
        versions={"python": platform.python_version(), **{name: version(name) for name in packages}, "torch": _torch()},
        newest_tested_torch=NEWEST_TESTED_TORCH,
        system=f"{platform.system()} {platform.machine()}",
        devices=(_cpu(), *_gpus()),
        backends=tuple(Backend(name=s.name, available=s.available, detail=s.detail) for s in kernels.report()),
        forced_backend=forced,
        backend_problem=problem,
        kernel_cache=_kernel_cache(),
        extras=tuple(_extra(name, requirements) for name, requirements in EXTRAS.items()),
    )


def _torch() -> str:
    """Return torch's version with its CUDA build, which some packages leave out."""
    import torch

    return str(torch.__version__)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def version(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cuda_formats(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return the formats below fp32 that GPUs of a compute capability multiply."""
    elements = sorted(ELEMENTS, key=lambda fmt: (fmt.cuda_capability or (0, 0), fmt.bits, -fmt.mantissa_bits))
    taken = [fmt for fmt in (*elements, *BLOCKS) if fmt.cuda_capability and fmt.cuda_capability <= capability]
    # The same units take all block formats of a width, so these go by the first part of their names.
    return tuple(dict.fromkeys(fmt.name.partition("_")[0] for fmt in taken))


def cpu_formats(cpuinfo: str) -> tuple[str, ...]:
    """Return the 16-bit formats of the processor of a Linux ``/proc/cpuinfo``."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    flags = {flag for key, _, value in lines if key.strip() in ("flags", "Features") for flag in value.split()}
    return tuple(fmt.name for fmt in ELEMENTS if flags.intersection(fmt.cpu_flags))


def _cpu() -> Device:
    import torch

    cpuinfo = _read("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    vector = torch.backends.cpu.get_cpu_capability()
    return Device(
        name="cpu",
        model=models[0] if models else platform.processor() or platform.machine(),
        detail=f"{counted(torch.get_num_threads(), 'thread')} on {counted(os.cpu_count() or 1, 'core')}, {vector}",
        memory_bytes=_memory_bytes(),
        formats=cpu_formats(cpuinfo),
        backend=_chosen("cpu"),
    )


def _gpus() -> list[Device]:
    import torch

    gpus: list[Device] = []
    for index in range(torch.cuda.device_count()):
        properties = cast("Any", torch.cuda.get_device_properties(index))
        capability = torch.cuda.get_device_capability(index)
        hip = torch.version.hip is not None
        gpus.append(
            Device(
                name=f"cuda:{index}",
                model=properties.name,
                detail=properties.gcnArchName if hip else f"sm_{capability[0]}{capability[1]}",
                memory_bytes=properties.total_memory,
                formats=() if hip else cuda_formats(capability),
                backend=_chosen(f"cuda:{index}"),
            )
        )
    return gpus


def _chosen(device: str) -> str:
    """Return the backend that the kernels choose for tensors of that device."""
    import torch

    from plimsoll.kernels import backend as _backend

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the table of backends says the same
            return _backend.choose(torch.empty(0, device=device)).__name__.rpartition(".")[2].removesuffix("_backend")
    except PlimsollError:
        return "none"


def _kernel_cache() -> Cache:
    try:
        from plimsoll.kernels import numba_backend

        folder = numba_backend.cache_folder()
    except Exception:  # noqa: BLE001  (a missing or broken Numba fails in any way; the table of backends says how)
        return Cache(folder=None, writable=False)
    if folder is None:
        return Cache(folder=None, writable=False)
    existing = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
    return Cache(folder=folder, writable=os.access(existing, os.W_OK))


def _extra(name: str, requirements: tuple[str, ...]) -> Extra:
    packages = [re.split(r"[\[>]", requirement)[0] for requirement in requirements]
    versions = {package: version(package) for package in packages}
    install = None if all(versions.values()) else install_line(name)
    return Extra(name=name, versions=versions, install=install)


def _memory_bytes() -> int | None:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: str) -> str:
    """Return the text of a file of the operating system, "" without such a file."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
