"""Facts of this machine as records: versions, devices, backends, caches, extras."""

import importlib.metadata
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from plimsoll import __version__
from plimsoll.errors import PlimsollError
from plimsoll.extras import EXTRAS, install_line
from plimsoll.formats import BLOCKS, ELEMENTS
from plimsoll.text import counted


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
        system=f"{platform.system()} {platform.machine()}",
        devices=(_cpu(), *_gpus()),
        backends=tuple(Backend(name=s.name, available=s.available, detail=s.detail) for s in kernels.report()),
        forced_backend=forced,
        backend_problem=problem,
        kernel_cache=_kernel_cache(),
        extras=tuple(_extra(name, requirements) for name, requirements in EXTRAS.items()),
    )


def _torch() -> str:
    """Return torch's version with its build, the CUDA version.

    Some packages leave that out.
    """
    import torch

    return str(torch.__version__)


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
