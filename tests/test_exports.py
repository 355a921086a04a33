"""The public names: those of `__all__`, those for type checkers, and those that are found, are the same."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import plimsoll
from tests.support.cases import each

TREE = ast.parse(Path(plimsoll.__file__).read_text(encoding="utf-8"))


def names_for_type_checkers() -> dict[str, str]:
    """Each name imported under TYPE_CHECKING, with the module that it comes from."""
    block = next(node for node in TREE.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    return {alias.name: node.module for node in block.body for alias in node.names}


def test_every_list_of_names_is_the_same() -> None:
    checked = names_for_type_checkers()
    assert sorted([*checked, "__version__"]) == sorted(plimsoll.__all__)
    lazy = {name: f"plimsoll.{room}" for name, room in plimsoll._HOME_OF.items()} | dict.fromkeys(
        plimsoll._ROOMS, "plimsoll"
    )
    assert lazy == checked


@each("name", plimsoll.__all__)
def test_every_public_name_is_found_and_documented(name: str) -> None:
    value = getattr(plimsoll, name)
    assert name in dir(plimsoll)
    if name != "__version__":
        assert inspect.getdoc(value), f"{name} has no docstring"
    if name in plimsoll._HOME_OF:
        assert value is getattr(getattr(plimsoll, plimsoll._HOME_OF[name]), name)


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from plimsoll import *", names)
    assert set(plimsoll.__all__) <= set(names)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plimsoll' has no attribute 'cats'"):
        _ = plimsoll.cats


def test_errors_have_one_root_and_a_built_in_base() -> None:
    public = [getattr(plimsoll, name) for name in plimsoll.__all__ if name.endswith("Error")]
    drawn = re.findall(r"(\w+Error) +\((\w+)\)", plimsoll.errors.__doc__ or "")
    assert {
        (error.__name__, error.__bases__[1].__name__) for error in public if error is not plimsoll.PlimsollError
    } == set(drawn)
    assert all(issubclass(error, plimsoll.PlimsollError) for error in public)
