"""Objects of lower packages are shown by functions of higher ones, which are found by name."""

import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from plimsoll import display
from plimsoll.errors import StateError
from tests import house

_ROOT = Path(__file__).parents[1]


def test_each_function_that_is_asked_for_is_declared_and_loads() -> None:
    used = {
        name
        for path in house.SOURCE.rglob("*.py")
        for name in re.findall(r'display\.function\("(\w+)"\)', path.read_text("utf-8"))
    }
    declared = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]["entry-points"][display.GROUP]
    assert used == set(declared) == entry_points(group=display.GROUP).names
    for name, target in declared.items():
        shown = display.function(name)
        assert f"{shown.__module__}:{shown.__name__}" == target


def test_an_unknown_function_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(StateError, match=r"expected an installed Plimsoll .* 'hologram' .*; got none\. Install"):
        display.function("hologram")
