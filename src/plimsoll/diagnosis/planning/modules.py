"""Which modules of a run a plan is about, and which recorded series tell of each.

A run knows a module by names and numbers of values only. It is taken to multiply matrices if

- it has a parameter called `weight` that has more values than its `bias` (those of norms have as many);
- floating tensors go into it, where its activations were recorded (an embedding gets indices);
- no part of its own name says that it is a norm.

Attention modules with weights of their own (`in_proj_weight`) and recurrent layers (`weight_ih_l0`) multiply too, but
what they multiply inside is not recorded. Others (norms, embeddings, activations) multiply nothing.

A module without inputs, outputs and gradients never computed, and no format matters to it: an average of the weights
(EMA), say.
"""

import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

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
    """A module that multiplies matrices, and the names of its series.

    `weight`: of its matrices; `inputs`, `outputs`: of its activations. `opaque`: what it multiplies inside is not
    recorded.
    """

    name: str
    weight: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    opaque: bool = False


@dataclass(slots=True)
class _Owner:
    """The parameters of a module by their last name: the series and its number of values."""

    parameters: dict[str, tuple[str, int]] = field(default_factory=dict[str, "tuple[str, int]"])


def modules_of(view: View, chosen: Collection[str] = (), left: Collection[str] = ()) -> list[Module]:
    """The modules of a run that multiply matrices, in its order.

    `chosen` are names of modules that do, whatever they look like; `left` of such that are left out.
    """
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
    """Whether anything that was recorded says that the module computed: inputs, outputs or gradients.

    An average of another module's weights, or a part that the training does not use, has none. Where activations or
    gradients were not recorded at all, nobody knows: it counts as one that computes.
    """
    gradients = set(view.run.tensors.get("gradients", ()))
    if not gradients or not view.run.tensors.get("activations"):
        return True
    return bool(module.inputs or module.outputs or gradients.intersection(module.weight))


def _owners(view: View) -> dict[str, _Owner]:
    """The modules that have parameters, by name."""
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
    """Names of parameters (those that share one with another included) and their series, with the number of values."""
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
    """The module of a parameter, and the parameter's own name in it."""
    if _PARAMETRIZED in parameter:
        module, _, rest = parameter.partition(_PARAMETRIZED)
        return module, rest.partition(".")[0]
    module, _, last = parameter.rpartition(".")
    return module or ROOT, last


def _sides(view: View) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names of each module's recorded inputs and outputs."""
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
    """The modules with parameters that names or globs match; raises `ArgumentError` for one that matches none."""
    owners, found = _owners(view), set[str]()
    for glob in (globs,) if isinstance(globs, str) else globs:
        names = {glob} if glob in owners else {name for name in owners if fnmatch.fnmatchcase(name, glob)}
        if not names:
            some = ", ".join(shown(name) for name in list(owners)[:5]) or "none"
            raise ArgumentError(
                f"plan: expected {argument} to name modules with parameters; got {glob!r}, which matches none. There "
                f"are {some}."
            )
        found |= names
    return found
