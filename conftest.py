"""What every test and doctest runs under: Triton's interpreter without a GPU, fixed seeds, and nothing left behind."""

import os
import random
import signal
import warnings
from collections.abc import Iterator

# torch's threads read this when it is imported: idle ones sleep, and do not spin while other workers need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import numpy as np
import pytest
import torch
from torch.nn.modules import module as torch_module

# In the background of a shell SIGINT is ignored, and so it would be by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton reads this variable when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Speed is measured in benchmarks/, never by a test's deadline. Under CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def _global_hooks() -> dict[str, dict[int, object]]:
    """The registries of the hooks that run for every module of the process."""
    return {n: v for n, v in vars(torch_module).items() if n.startswith("_global_") and n.endswith("hooks")}


def _process_state() -> dict[str, object]:
    """The global settings and hooks that a test could leave changed."""
    hooks = {name: len(registry) for name, registry in _global_hooks().items()}
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "torch function modes": torch._C._len_torch_function_stack(),  # noqa: SLF001  (torch has no public name for it)
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


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the test that leaves a global hook or a changed setting behind."""
    before = _process_state()
    yield
    after = _process_state()
    if after != before:
        _restore(before)
        changed = "; ".join(f"{key}: {before[key]} -> {after[key]}" for key in before if before[key] != after[key])
        pytest.fail(f"the test left process-wide state changed: {changed}")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in every run and in any order of tests."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (the legacy global generator is what libraries under test would use)
    torch.manual_seed(0)
