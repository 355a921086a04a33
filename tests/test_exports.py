"""The public names: those of `__all__`, those for type checkers, and those that are found, are the same."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import plimsoll
from plimsoll.certification.certificate import Inferred
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
    lazy = {name: f"plimsoll.{home}".rstrip(".") for name, home in plimsoll._HOMES.items()}
    assert lazy == checked


@each("name", plimsoll.__all__)
def test_every_public_name_is_found_and_documented(name: str) -> None:
    value = getattr(plimsoll, name)
    assert name in dir(plimsoll)
    if name != "__version__":
        assert inspect.getdoc(value), f"{name} has no docstring"
    if plimsoll._HOMES.get(name):
        assert value is getattr(getattr(plimsoll, plimsoll._HOMES[name]), name)


def test_completion_offers_public_names_alone() -> None:
    assert {name for name in dir(plimsoll) if not name.startswith("__")} == {*plimsoll.__all__} - {"__version__"}
    assert not {"importlib", "exports", "TYPE_CHECKING"} & {
        *dir(plimsoll.diagnosis),
        *dir(plimsoll.unit),
        *dir(plimsoll.report),
    }


_PUBLIC = [f"plimsoll.{name}" for name, home in plimsoll._HOMES.items() if not home and name not in ("errors", "lab")]


@each("package", [*_PUBLIC, "plimsoll.unit.nn", "plimsoll.unit.optim"])
def test_classes_name_the_package_that_exports_them(package: str) -> None:
    """A pickle names a class by its module, so a class can move to another file without breaking pickles."""
    tree = ast.parse(Path(importlib.import_module(package).__file__ or "").read_text(encoding="utf-8"))
    names = [a.asname or a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names]
    for name in names:
        value = getattr(sys.modules[package], name, None)
        if isinstance(value, type) and value.__module__.startswith("plimsoll."):
            assert not value.__module__.startswith(f"{package}."), value


def test_a_star_import_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from plimsoll import *", names)
    assert set(plimsoll.__all__) <= set(names)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'plimsoll' has no attribute 'cats'"):
        _ = plimsoll.cats


@each(
    ("of", "name", "near"),
    [
        (plimsoll, "Runx", "Run"),
        (plimsoll, "wach", "watch"),
        (plimsoll.formats, "gett", "get"),
        (plimsoll.unit, "convertt", "convert"),
        (plimsoll.unit.nn, "Linera", "Linear"),
        (plimsoll.Run, "sclars", "scalars"),
        (plimsoll.Finding, "evidnce", "evidence"),
        (plimsoll.Watch, "closes", "close"),
        (plimsoll.Spectrum, "kurtosi", "kurtosis"),
        (Inferred(rounding="nearest_even"), "roundin", "rounding"),
    ],
)
def test_the_traceback_of_a_wrong_name_suggests_the_near_one(
    of: object, name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AttributeError) as raised:
        getattr(of, name)
    sys.__excepthook__(AttributeError, raised.value, None)
    assert f"Did you mean: '{near}'?" in capsys.readouterr().err


def test_errors_have_one_root_and_a_built_in_base() -> None:
    public = [getattr(plimsoll, name) for name in plimsoll.__all__ if name.endswith("Error")]
    drawn = re.findall(r"(\w+Error) +\((\w+)\)", plimsoll.errors.__doc__ or "")
    assert {
        (error.__name__, error.__bases__[1].__name__) for error in public if error is not plimsoll.PlimsollError
    } == set(drawn)
    assert all(issubclass(error, plimsoll.PlimsollError) for error in public)
