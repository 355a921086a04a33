"""The plugins that every test runs under: kinds, order, what is left behind, what is said of skipped tests."""

import itertools
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import plimsoll as pl
from tests import tiers
from tests.support import browser, left_behind


def starts_a_process() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def compiles() -> None:
    torch.compile(nn.Identity())


@pytest.fixture
def process() -> None:
    """A fixture whose code starts a process, where it is asked to."""
    if threading.active_count() < 0:
        starts_a_process()


def test_a_test_that_starts_a_process_in_a_fixture_is_slow(request: pytest.FixtureRequest, process: None) -> None:
    assert tiers.kinds_of(request.node) == {"processes"}
    assert request.node.get_closest_marker("slow") and request.node.get_closest_marker("processes")


def test_a_test_that_compiles_in_a_helper_is_slow(request: pytest.FixtureRequest) -> None:
    if request is None:
        compiles()
    assert tiers.kinds_of(request.node) == {"compile"}


def test_any_other_test_is_quick(request: pytest.FixtureRequest) -> None:
    assert tiers.kinds_of(request.node) == set() and not request.node.get_closest_marker("slow")


def test_the_tests_that_are_listed_as_slow_are_there() -> None:
    listed = [line for line in (tiers.HERE / "slow.txt").read_text("utf-8").splitlines() if not line.startswith("#")]
    files = {name.partition("::")[0] for name in listed}
    assert listed == sorted(set(listed)) and all((tiers.HERE.parent / name).exists() for name in files)


def test_the_list_of_slow_tests_is_made_from_costs() -> None:
    costs = "0.11 - t.py::one@group\n0.09 - t.py::two[a b]\n0.3 - t.py::two[c]@t.py\n9 gpu t.py::three\n"
    costs += "0.08 - t.py::cases[x]\n" * 6
    assert tiers.slow_tests(costs) == ["t.py::cases", "t.py::one", "t.py::two"]
    assert tiers.slow_tests(costs.replace("0.3", "0.03")) == ["t.py::cases", "t.py::one"]


def test_random_order_keeps_files_together_and_repeats() -> None:
    def order(seed: int) -> list[str]:
        items = [SimpleNamespace(nodeid=f"tests/test_{file}.py::test_{i}") for file in "abcd" for i in range(6)]
        tiers.shuffle(items, seed)
        return [item.nodeid for item in items]

    assert order(1) == order(1) != order(2) and sorted(order(1)) == sorted(order(2))
    files = [name.partition("::")[0] for name in order(1)]
    assert sum(a != b for a, b in itertools.pairwise(files)) == 3


def test_one_line_says_what_was_skipped_and_why() -> None:
    why = "Skipped: install Chromium"
    skipped = [SimpleNamespace(longrepr=("f", 1, why), keywords={"browser": 1}) for _ in range(48)]
    skipped += [SimpleNamespace(longrepr=("f", 1, "Skipped: needs a CUDA device: graphs"), keywords={}) for _ in "12"]
    lines: list[str] = []
    tiers.pytest_terminal_summary(SimpleNamespace(stats={"skipped": skipped}, write_line=lines.append))
    assert lines == ["Skipped: 48 browser tests: install Chromium; 2 GPU tests: need a CUDA device."]
    tiers.pytest_terminal_summary(SimpleNamespace(stats={}, write_line=lines.append))
    assert len(lines) == 1


def test_a_watch_that_is_left_open_is_found_and_closed(tmp_path: Path) -> None:
    before = left_behind.open_watches()
    model = nn.Linear(2, 2)
    watch = pl.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "run")
    said = left_behind.left_open(before)
    assert said and all("close the watch" in each for each in said) and left_behind.open_watches() == before
    watch.close()
    assert left_behind.left_open(before) == []


def test_chromium_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM", "none")
    assert browser.find_chromium() is None
    monkeypatch.setenv("CHROMIUM", "/opt/chromium")
    assert browser.find_chromium() == "/opt/chromium"
