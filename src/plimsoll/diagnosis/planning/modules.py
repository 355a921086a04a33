"""Modules of a run that a plan is about, and the recorded series of each.

A run has only names of modules and numbers of values. A module is taken to multiply matrices if

- it has a parameter called `weight` with more values than its `bias` (those of norms have as many);
- its inputs are floating tensors, if activations were recorded (an embedding gets indices);
- no part of its own name is that of a norm.

Attention modules with their own weights (`in_proj_weight`) and recurrent layers (`weight_ih_l0`) multiply too, but the
operands inside are not recorded. Others (norms, embeddings, activations) multiply nothing.

A module without inputs, outputs and gradients never computed, for example an average of the weights (EMA). No format
matters to it.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from plimsoll.checks import items
from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.tables.cells import Cells
from plimsoll.diagnosis.view import View
from plimsoll.errors import ArgumentError
from plimsoll.tensor_collections import BEFORE_UPDATE_OF_PARAMETERS, OF_MODULES

ROOT = "model"  # what the root module is called, as in a watch
_NORM = re.compile(r"norm|(^|_)(ln|bn|gn|rms)(_\w|\d)*$", re.IGNORECASE)
_INNER = re.compile(r"(in_proj|[qkv]_proj)_weight$|weight_[ih]h_l\d+")
_PARAMETRIZED = ".parametrizations."


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module that multiplies matrices, with the names of its series."""

    name: str
    weight: tuple[str, ...]  # the series of its matrix
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    opaque: bool = False  # whether its operands inside are not recorded


@dataclass(slots=True)
class _Owner:
    """Parameters of a module by their last name: the series and its number of values."""

    parameters: dict[str, tuple[str, int]] = field(default_factory=dict[str, "tuple[str, int]"])


def modules_of(view: View, chosen: Collection[str] = (), left: Collection[str] = ()) -> list[Module]:
    """Return the modules that multiply matrices (`chosen` ones in any case, not those `left`), in the run's order."""
    owners = _owners(view)
    sides, recorded = _sides(view), set(view.run.tensors.get("activations", ()))
    found: list[Module] = []
    for name, owner in owners.items():
        inputs, outputs = sides.get(name, ((), ()))
        inner = any(_INNER.search(each) for each in owner.parameters)
        embeds = not inputs and any(series in recorded for series in outputs)
        wanted = name in chosen or inner or (_has_matrix(name, owner) and not embeds)
        weight = tuple(series for last, (series, _) in owner.parameters.items() if "bias" not in last)
        if wanted and weight and name not in left:
            opaque = inner and name not in chosen
            found.append(Module(name=name, weight=weight, inputs=inputs, outputs=outputs, opaque=opaque))
    return found


def computes(view: View, module: Module) -> bool:
    """Return whether a module computed: it has inputs, outputs or gradients.

    An average of another module's weights, or a part that the training does not use, has none. If neither activations
    nor gradients were recorded, a module counts as one that computes.
    """
    gradients = set(view.run.tensors.get("gradients", ()))
    if not gradients or not view.run.tensors.get("activations"):
        return True
    return bool(module.inputs or module.outputs or gradients.intersection(module.weight))


def _owners(view: View) -> dict[str, _Owner]:
    found: dict[str, _Owner] = {}
    for collection in BEFORE_UPDATE_OF_PARAMETERS:
        cells = view.cells(collection)
        if cells is None:
            continue
        for (alias, series), count in _parameters(cells, view.run.manifest).items():
            module, last = _owner_of(alias)
            found.setdefault(module, _Owner()).parameters.setdefault(last, (series, count))
    for name in [name for name in found if name.endswith(".out_proj")]:
        around = found.get(name.removesuffix(".out_proj"))
        if around is not None and any(_INNER.search(each) for each in around.parameters):
            # It is never called: the attention around it multiplies by its weight.
            inside = found.pop(name).parameters
            around.parameters |= {f"out_proj.{last}": parameter for last, parameter in inside.items()}
    return found


def _parameters(cells: Cells, manifest: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return names of parameters, also those that share a tensor, with their series and number of values."""
    counts = np.zeros(len(cells.names), dtype=np.int64)
    np.maximum.at(counts, cells.layer, cells.column("count"))
    known = dict(zip(cells.names, counts.tolist(), strict=True))
    found = {(name, name): count for name, count in known.items()}
    tied = cast("Mapping[str, Any]", manifest.get("tied") or {})
    for name, aliases in tied.items():
        if name in known and isinstance(aliases, list):
            found |= {(str(alias), name): known[name] for alias in cast("list[object]", aliases)}
    return found


def _owner_of(parameter: str) -> tuple[str, str]:
    """Return the module of a parameter, and the parameter's own name in it."""
    if _PARAMETRIZED in parameter:
        module, _, rest = parameter.partition(_PARAMETRIZED)
        return module, rest.partition(".")[0]
    module, _, last = parameter.rpartition(".")
    return module or ROOT, last


def _sides(view: View) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the names of each module's recorded inputs and outputs."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for collection in OF_MODULES:
        for series in view.run.tensors.get(collection, ()):
            module, _, side = series.rpartition(":")
            if side.partition(".")[0] in ("input", "output"):
                place = found.setdefault(module, ([], []))[side.startswith("output")]
                place += [] if series in place else [series]
    return {name: (tuple(inputs), tuple(outputs)) for name, (inputs, outputs) in found.items()}


def _has_matrix(name: str, owner: _Owner) -> bool:
    weight, bias = owner.parameters.get("weight"), owner.parameters.get("bias")
    if weight is None or weight[1] < 2 or (bias is not None and weight[1] <= bias[1]):
        return False
    return not _NORM.search(name.rpartition(".")[2])


def named(view: View, argument: str, globs: Sequence[str]) -> set[str]:
    """Return the modules with parameters that match names or globs; ArgumentError for one that matches none."""
    owners, found = _owners(view), set[str]()
    for glob in (globs,) if isinstance(globs, str) else items("plan", argument, globs):
        names = set[str]()
        if isinstance(glob, str):
            names = {glob} if glob in owners else {name for name in owners if fnmatch.fnmatchcase(name, glob)}
        if not names:
            some = ", ".join(shown(name) for name in list(owners)[:5]) or "none"
            raise ArgumentError(
                f"plan: expected {argument} to name modules with parameters; got {glob!r}, which matches none. There "
                f"are {some}."
            )
        found |= names
    return found
