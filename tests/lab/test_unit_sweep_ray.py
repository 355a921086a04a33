"""Tasks on a local Ray of two CPUs: the local engine's answers exactly, and errors that say what to do."""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.errors import BackendError, MissingExtraError, PlimsollError
from plimsoll_lab.experiments.unit_sweep.grid import FP16, UNIT_FP16, Configuration, Design
from plimsoll_lab.experiments.unit_sweep.training import TRAINED, Setup, to_task
from plimsoll_lab.running.engines import carry_out_on
from plimsoll_lab.running.ray_engine import carry_out_on_ray, does
from plimsoll_lab.running.workers import carry_out

SMALL = Setup(steps=4, warmup=1, pieces=2, length=8, width=8, held_out=2)


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """One Ray for all tests here, as a user's own would be: what is tested must not end it."""
    found = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.9'")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        found.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield found
        found.shutdown()
    signal.signal(signal.SIGTERM, before)


def test_a_cluster_gives_what_local_processes_give(ray: Any) -> None:
    design = Design(sequence="convolution", norm="pre", residual="fixed", optimizer="adamw", depth=2)
    tasks = [
        to_task(Configuration(design=design, way=way, rate=2), SMALL, seed=3, device="cpu") for way in (FP16, UNIT_FP16)
    ]
    came: dict[int, Any] = {}
    there = carry_out_on("ray", TRAINED, tasks, device="cpu", done=came.__setitem__)
    assert there == carry_out(TRAINED, tasks, workers=1)
    assert came == dict(enumerate(there)) and there[0] != there[1]
    assert ray.is_initialized()
    with pytest.raises(PlimsollError, match=r"expected the training third to end; got this from Ray(?s:.)*JSON"):
        carry_out_on_ray("json:loads", [{"name": "third"}])
    with pytest.raises(BackendError, match="expected a cluster with a GPU for device=cuda; got none that Ray knows of"):
        carry_out_on_ray("json:dumps", [{}], gpus=64)


def test_no_tasks_need_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll_lab.running.ray_engine._cluster", pytest.fail)
    assert carry_out_on_ray("json:dumps", []) == []


def test_a_task_is_done_from_its_name_and_json() -> None:
    assert does("json:dumps", '{"a": 1}') == '{"a": 1}'


def test_without_ray_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtraError, match=r"expected the package ray; got none. Install it: pip install 'ray>=2.9'$"
    ):
        carry_out_on("ray", "json:dumps", [{}], device="cpu")
