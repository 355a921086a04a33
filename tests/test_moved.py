"""Pickles of version 0.1 find the classes where they are now."""

import importlib
import inspect
import pickle

import pytest

from plimsoll.moved import MOVED, Finder
from tests.support import processes
from tests.support.cases import each


@each("old", MOVED)
def test_a_class_is_found_under_its_old_name(old: str) -> None:
    module = importlib.import_module(f"plimsoll.{MOVED[old]}")
    # A public class names its package as its module, and not the file that defines it.
    own = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and f"{module.__name__}.".startswith(f"{value.__module__}.")
    ]
    assert own or any(other.startswith(f"{old}.") for other in MOVED)
    for name in own:
        assert pickle.loads(f"cplimsoll.{old}\n{name}\n.".encode()) is getattr(module, name)


def test_other_modules_of_the_old_layout_are_gone_and_none_is_imported_unasked() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'plimsoll.watch._seams'"):
        importlib.import_module("plimsoll.watch._seams")
    with pytest.raises(ModuleNotFoundError, match="No module named 'fp8'"):
        importlib.import_module("fp8._linear")  # a module of somebody else, which is missing
    assert Finder().find_spec("fp8._linear", None) is None
    probe = (
        "import sys, plimsoll.scaling; print(*[name for name in sys.modules if '._' in name and 'plimsoll' in name])"
    )
    result = processes.python("-c", probe)
    assert (result.returncode, result.stdout.split()) == (0, []), result.stderr
