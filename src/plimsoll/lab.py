"""Former home of the experiments, now ``plimsoll_lab``; stays for one release."""

import importlib
import warnings


def __getattr__(name: str) -> object:
    if name.startswith("__"):  # what imports and inspection ask of any module
        raise AttributeError(f"module 'plimsoll.lab' has no attribute {name!r}")
    value = getattr(importlib.import_module("plimsoll_lab"), name)
    warnings.warn(f"plimsoll.lab.{name} is plimsoll_lab.{name} now.", DeprecationWarning, stacklevel=2)
    return value
