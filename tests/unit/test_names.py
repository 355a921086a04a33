"""The names of `plimsoll.unit`: those for type checkers and those that are found are the same."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from plimsoll import unit
from tests.support.patience import HANG_SECONDS


def test_every_list_of_names_is_the_same() -> None:
    block = next(
        node for node in ast.parse(Path(unit.__file__).read_text(encoding="utf-8")).body if isinstance(node, ast.If)
    )
    checked = {
        alias.asname: node.module.removeprefix("plimsoll.unit").lstrip(".")
        for node in block.body
        for alias in node.names
    }
    assert checked == unit._MODULES
    for name in checked:
        assert name in dir(unit) and getattr(unit, name).__doc__


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plimsoll.unit' has no attribute 'cats'"):
        _ = unit.cats


def test_formulas_alone_load_no_graph() -> None:
    script = "import sys, plimsoll.unit.formulas; print('networkx' in sys.modules, 'torch.export' in sys.modules)"
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    )
    assert finished.stdout.split() == ["False", "False"]
