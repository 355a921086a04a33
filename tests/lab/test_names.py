"""The names of `plimsoll_lab`: those for type checkers and those that are found are the same; a worker loads few."""

import ast
import tomllib
from pathlib import Path

import pytest

import plimsoll_lab as lab
from plimsoll.version import __version__
from tests.support import processes


def test_every_list_of_names_is_the_same() -> None:
    block = next(
        node for node in ast.parse(Path(lab.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    checked = {a.asname: node.module.removeprefix("plimsoll_lab.") for node in block.body for a in node.names}
    assert checked == lab._HOMES
    for name in checked:
        assert name in dir(lab) and hasattr(lab, name)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plimsoll_lab' has no attribute 'cats'"):
        _ = lab.cats


def test_a_worker_loads_no_experiment() -> None:
    script = "import sys, plimsoll_lab.running.workers; print('plimsoll_lab.registry' in sys.modules)"
    finished = processes.python("-c", script)
    assert finished.stdout.split() == ["False"], finished.stderr


def test_the_laboratory_needs_the_plimsoll_of_its_own_version() -> None:
    file = Path(__file__).parents[2] / "lab" / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__
    assert project["dependencies"] == [f"plimsoll[report]=={__version__}"]
