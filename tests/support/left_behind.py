"""Pytest plugin: a test that leaves a watch, a hook or a changed setting behind fails."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.modules import module as torch_module


def _global_hooks() -> dict[str, dict[int, object]]:
    """The registries of the hooks that run for every module of the process."""
    return {n: v for n, v in vars(torch_module).items() if n.startswith("_global_") and n.endswith("hooks")}


def _process_state() -> dict[str, object]:
    """The global settings and hooks that a test could leave changed."""
    hooks = {name: len(registry) for name, registry in _global_hooks().items()}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "torch function modes": torch._C._len_torch_function_stack(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast on cpu": torch.is_autocast_enabled("cpu"),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic, warning only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "float32 matmul precision": _matmul_precision(),
        "numpy errors": np.geterr(),
        "environment": {
            name: os.environ[name] for name in os.environ if name.startswith(("PLIMSOLL_", "TRITON_INTERPRET"))
        },
        **hooks,
    }


def _matmul_precision() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns whoever reads it after the newer settings were used
        return torch.get_float32_matmul_precision()


def _restore(state: dict[str, object]) -> None:
    """Puts back what can be, so that one leak fails one test and not all that follow."""
    torch.set_default_dtype(state["default dtype"])
    if torch.get_default_device() != state["default device"]:
        torch.set_default_device(state["default device"])  # which leaves a mode active, so not without need
    torch.set_num_threads(state["threads"])
    torch.set_grad_enabled(state["grad mode"])
    torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["deterministic, warning only"])
    torch.set_float32_matmul_precision(state["float32 matmul precision"])
    np.seterr(**state["numpy errors"])
    for name, registry in _global_hooks().items():
        if not state[name]:
            registry.clear()


_SCALER = {name: vars(torch.amp.GradScaler)[name] for name in ("scale", "step", "update")}
_BACKWARD, _PLATEAU = torch.autograd.backward, torch.optim.lr_scheduler.ReduceLROnPlateau.step


def still_wrapped() -> list[str]:
    """What a watch wraps in torch and is wrapped although nothing listens any more."""
    if open_watches():
        return []
    names = [f"torch.amp.GradScaler.{n}" for n, f in _SCALER.items() if vars(torch.amp.GradScaler)[n] is not f]
    if torch.autograd.backward is not _BACKWARD:
        names.append("torch.autograd.backward")
    if torch.optim.lr_scheduler.ReduceLROnPlateau.step is not _PLATEAU:
        names.append("torch.optim.lr_scheduler.ReduceLROnPlateau.step")
    seams = sys.modules.get("plimsoll.watch.hooks.torch_hooks")
    installed = [] if seams is None else [f"_seams.{n}" for n in ("_undo", "_patched") if getattr(seams, n)]
    return [f"{name} is not torch's own" for name in names] + [f"{name} is not empty" for name in installed]


def open_watches() -> list[object]:
    """Open watches, and all else that listens to torch."""
    seams = sys.modules.get("plimsoll.watch.hooks.torch_hooks")
    return [] if seams is None else seams.listeners()


def left_open(before: list[object]) -> list[str]:
    """Closes what began to listen since, so that one open watch fails one test; returns its names."""
    if len(open_watches()) > len(before):
        gc.collect()  # a watch that only a cycle of references keeps is the collector's, as its documentation says
    left = [listener for listener in open_watches() if not any(listener is known for known in before)]
    for listener in left:
        sys.modules["plimsoll.watch.hooks.torch_hooks"].unsubscribe(listener)
    return [f"{type(listener).__name__} still listens to torch: close the watch" for listener in left]


def forget_compiled() -> None:
    """Drops compiled code. Otherwise a watch in a later test would, and write an event about it."""
    if getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0):
        torch.compiler.reset()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaves a watch, a global hook or a changed setting behind."""
    listeners, before = open_watches(), _process_state()
    yield
    forget_compiled()
    left = left_open(listeners) + still_wrapped()
    after = _process_state()
    if after != before:
        _restore(before)
        left += [f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
    if left:
        pytest.fail(f"the test left process-wide state changed: {'; '.join(left)}")
