"""`probe`: whether a model fits a format, from a handful of batches."""

import contextlib
import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll import checks, emulate
from plimsoll.diagnosis import Finding, View, plan
from plimsoll.diagnosis.finding import Spot
from plimsoll.diagnosis.planning.format_choice import Judge
from plimsoll.diagnosis.planning.modules import Module, computes, modules_of
from plimsoll.diagnosis.rules.errors import DecisionFlips
from plimsoll.diagnosis.rules.nonfinite import Nonfinite
from plimsoll.errors import ArgumentError, NotRecordedError, PlimsollError
from plimsoll.formats import Plan
from plimsoll.kernels.dtypes import TRAINING
from plimsoll.microscope.draws import untouched
from plimsoll.probing import forward, sources
from plimsoll.probing.comparison import Calls, Comparison, Context, compare
from plimsoll.probing.result import Probe, Question, module_of
from plimsoll.runs import Run
from plimsoll.runs.records import FLIPS, MARGIN
from plimsoll.spectrum import measure
from plimsoll.tensor_collections import BACKWARD, FORWARD, LABELS
from plimsoll.text import clause, percent
from plimsoll.watch import watch
from plimsoll.watch.names import class_of, module_names, unwrapped
from plimsoll.watch.session import watches_muted

COLLECT = (*FORWARD, *BACKWARD)
BATCHES = 4
_ORDER = ("alarm", "warning", "info")
_RANDOM = (
    "No data was given: batches are random tokens. Real text may reach other values. Give some with --data or data=."
)

Loss = Callable[[nn.Module, Any], Tensor]


def probe(
    model_or_path: "nn.Module | str | os.PathLike[str]",
    data: object = None,
    fmt: object = "fp16",
    *,
    loss: Loss | None = None,
    batches: int = BATCHES,
) -> Probe:
    """Return a model's fit to a format: overflow, underflow, flipped decisions.

    A few batches run in FP32 and are recorded as `plimsoll.watch` does. Weights and activations are judged by their
    spectra, and gradients by `plimsoll.plan`. Then the same batches run in the format, emulated where the machine lacks
    it: values that become NaN or infinite are found, and decisions (the most likely class, top-k routes) are compared.

    Nothing stays: weights, gradients, buffers, random generators and the modules' attributes are as before.

    Args:
        model_or_path: A model; a folder of transformers with config.json and safetensors; or a file of weights (from
            `torch.save` or safetensors), of which the weights alone can be judged. No code of a file is run.
        data: Batches, of which the first are used: an iterable, one batch, or a file of them. A tensor, a tuple or a
            mapping is passed to the model as its argument, arguments or keywords. Default: random tokens for a folder
            of a language model.
        fmt: A format, or "fp8", "mxfp8" or "mxfp6", which have one for the forward and one for the backward. Default:
            "fp16".
        loss: Function of the model and a batch that returns the loss; it calls the model. Default: the `loss` of the
            model's output, if it has one. Without a loss, gradients are not judged.
        batches: Number of batches to use. Default: 4.

    Returns:
        The answer.

    Raises:
        ArgumentError: The model or the data cannot be used or read.
        FormatError: The format does not exist or holds scales only.
        MissingExtraError: The file needs a package that is not installed.

    >>> import plimsoll as pl
    >>> model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> found = pl.probe(model, torch.randn(4, 8, 16).unbind(), "fp16", loss=lambda m, x: m(x).square().mean())
    >>> found.fits, found.plan.format_for("0").name
    (True, 'fp16')
    """
    question = Question.of(fmt)
    checks.integer("probe", "batches", batches, low=1, remedy="A handful is enough: use 4.")
    if isinstance(model_or_path, nn.Module):
        if data is None:
            raise ArgumentError("probe: expected data with a model; got none. Pass a list of batches or a loader.")
        name = class_of(model_or_path).__name__
        return _of_model(model_or_path, sources.batches_of(data, batches), question, loss, name, [])
    if not isinstance(model_or_path, str | os.PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"probe: expected a torch.nn.Module or the path of one; got {type(model_or_path).__name__}. Pass the model."
        )
    path = Path(model_or_path)
    if not path.exists():
        raise ArgumentError(
            f"probe: expected a model, its folder, or a file of weights; got {os.fspath(path)!r}, which is not there. "
            "Correct the path."
        )
    if sources.is_model_folder(path):
        return _of_folder(path, data, question, loss, batches)
    if data is not None:
        raise ArgumentError(
            f"probe: expected no data with weights alone, which nothing runs; got {os.fspath(path)!r} with data. Load "
            "them into a model and pass that."
        )
    return _of_weights(sources.load_weights(path), question, path.name)


def _of_folder(path: Path, data: object, question: Question, loss: Loss | None, batches: int) -> Probe:
    model, remarks = sources.load_model(path)
    if data is None:
        given = sources.random_tokens(model, batches)
        remarks.append(_RANDOM)
    else:
        given = sources.batches_of(data, batches)
    given = list(sources.with_labels(model, given))
    return _of_model(model, given, question, loss, path.resolve().name, remarks)


def _of_weights(weights: Mapping[str, Tensor], question: Question, subject: str) -> Probe:
    """Answer for weights alone: matrices are taken for operands of products."""
    measured = measure(weights, block=question.block)
    spectra = {"weights": {name: [(0, s)] for name, s in measured.items()}}
    matrices = [name for name, x in weights.items() if x.dim() > 1]
    found = forward.findings(question, spectra, {"weights": matrices})
    rest = ", ".join([LABELS[name] for name in COLLECT if name != "weights"])
    return Probe(
        subject=subject, format=question.name, findings=_sorted(found), judged=("weights",),
        not_judged=(f"Not judged: {rest} and decisions. A file of weights runs nothing.",),
    )  # fmt: skip


def _of_model(
    model: nn.Module, batches: Sequence[Any], question: Question, loss: Loss | None, subject: str, remarks: list[str]
) -> Probe:
    checks.initialized("probe", model)
    root = unwrapped(model)
    if any(map(_is_narrow, root.parameters())):
        root = copy.deepcopy(root).float()
        batches = pytree.tree_map_only(Tensor, lambda x: x.float() if _is_narrow(x) else x, list(batches))
        remarks = [*remarks, "The model was widened to FP32 first."]
    device = next((p.device for p in root.parameters()), torch.device("cpu"))
    with untouched(root), tempfile.TemporaryDirectory(prefix="plimsoll-") as folder:
        with watches_muted():
            watched = watch(
                root, run=Path(folder) / "run", every=1, collect=COLLECT, recorder=(), block=question.block,
                max_bytes=1 << 62, quiet=True,
            )  # fmt: skip
            cast("Any", watched)._steps.taps.takes_eval_forward = True  # noqa: SLF001
            calls = Calls(root, len(batches))
            try:
                for batch in batches:
                    _step(root, pytree.tree_map_only(Tensor, lambda x: x.to(device), batch), loss)
                    watched.step()
            finally:
                calls.close()
                watched.close()
        return examine(root, Path(folder) / "run", calls, question, subject=subject, remarks=remarks)


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize < torch.float32.itemsize


def _step(model: nn.Module, batch: Any, loss: Loss | None) -> None:
    model.zero_grad()
    try:
        with torch.enable_grad():
            found: Any = getattr(_called(model, batch), "loss", None) if loss is None else loss(model, batch)
    except PlimsollError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"probe: expected batches that the model takes; got {type(error).__name__}: {clause(error)}. With targets "
            "among them pass loss=, a function of the model and a batch."
        ) from error
    if isinstance(found, Tensor) and found.numel() == 1 and found.requires_grad:
        found.backward()
    elif loss is not None:
        raise ArgumentError(
            f"probe: expected loss to return a tensor of one number that requires a gradient; got {found!r:.100}. "
            "Return the loss before its backward."
        )


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**cast("Mapping[str, Any]", batch))
    return model(*cast("Sequence[Any]", batch)) if isinstance(batch, list | tuple) else model(batch)


def examine(
    root: nn.Module, run: Path, calls: Calls, question: Question, *, subject: str, remarks: Sequence[str] = ()
) -> Probe:
    """Return the answer from recorded batches and repeated calls. The model's mode and buffers may change."""
    view = View(Run(run))
    if not view.run.steps or "activations" not in view.run.tensors:
        raise NotRecordedError("probe: expected a model whose modules are called; got one that recorded nothing.")
    # By their weights alone embeddings look like modules that multiply, where they are called under another name.
    tables = {name for name, module in module_names(root).items() if isinstance(module, nn.Embedding)}
    found_modules = [m for m in modules_of(view) if computes(view, m)]
    modules = [m for m in found_modules if m.name not in tables]
    left_out = [m.name for m in found_modules if m.name in tables]
    spectra = forward.spectra_of(view.run)
    operands = forward.operands_of(modules, outputs=question.is_native)
    found = forward.findings(question, spectra, operands)
    uniform = forward.uniform(question, modules, spectra)
    if any(map(_is_narrow, root.parameters())):  # a script's own: the comparison is with FP32
        root = copy.deepcopy(root).float()
    compared, why = Comparison(), None
    try:
        compared = compare(root, calls, lambda: _in_format(question, uniform, root))
    except Exception as error:  # noqa: BLE001  (of the model's own code, as where it casts to 16 bits by itself)
        why = f"{type(error).__name__}: {clause(error)}"
    found += [*_broken(question, compared, found), *_flips(question, compared)]
    unjudged = [LABELS[name] for name in COLLECT if name not in view.run.tensors]
    not_judged = [f"Not judged: {', '.join(unjudged)}. There was no loss."] if unjudged else []
    if why is not None:
        not_judged.append(f"Not judged: decisions. The model failed when its calls were repeated in FP32: {why}.")
    opaque = [m.name for m in modules if m.opaque]
    if opaque:
        not_judged.append(f"Not judged: products inside {', '.join(opaque[:3])}, but for NaN and infinities.")
    made, notes = _planned(view, question, uniform, found, subject, left_out if not unjudged else None)
    if made is not None and not unjudged:
        more, unknown = _from_plan(view, question, made, modules, found)
        found += more
        not_judged += (
            [f"Not judged: gradients of {', '.join(unknown[:3])}, which were not recorded."] if unknown else []
        )
    return Probe(
        subject=subject, format=question.name, findings=_sorted(found), plan=made, batches=len(view.run.steps),
        judged=tuple(name for name in COLLECT if name in view.run.tensors), not_judged=tuple(not_judged),
        remarks=(*remarks, *notes),
    )  # fmt: skip


def _in_format(question: Question, uniform: Plan, root: nn.Module) -> Context:
    name = question.forward.name
    if question.is_exact or not uniform.formats:
        return contextlib.nullcontext()
    if name in TRAINING:
        return emulate.emulate(name)
    if question.is_native:
        return emulate.emulate(forward=name, backward=name)
    return emulate.emulate(uniform, model=root)


def _broken(question: Question, compared: Comparison, found: Iterable[Finding]) -> list[Finding]:
    """Return a finding of outputs that only the format breaks, if not known."""
    known = {module_of(f, name) for f in found if f.rule in ("overflow", Nonfinite.id) for name in f.where}
    names = [name for name in compared.broken if name not in known]
    if not names or (known and compared.broken[0] in known):
        return []
    return [
        _finding(
            "overflow", "alarm", names, {"worst": names[0], "modules": len(names)},
            f"The output is NaN or infinite in {question.title}, and finite in FP32: first that of {names[0]}.",
            "A value inside the first of these exceeds the format: keep it in BF16 or FP32.",
        )
    ]  # fmt: skip


def _flips(question: Question, compared: Comparison) -> list[Finding]:
    """Return findings of decisions that flip too often (by the limit of `decision-flips`), and of the rest."""
    if compared.broken:
        return []
    shares = {name.removeprefix(FLIPS): x for name, x in compared.scalars.items() if name.startswith(FLIPS)}
    limit, found = DecisionFlips().share, list[Finding]()
    for many in (True, False):
        names = sorted((n for n, x in shares.items() if x > 0 and (x > limit) == many), key=lambda n: -shares[n])
        if not names:
            continue
        worst, margin = names[0], compared.scalars.get(f"{MARGIN}{names[0]}", math.nan)
        evidence: dict[str, float | int | str] = {"worst": worst, "flips": shares[worst], "limit": limit}
        evidence |= {"margin": margin} if math.isfinite(margin) else {}
        meaning = f"{percent(shares[worst])} of the decisions of {worst} come out otherwise in {question.title}."
        advice = "Compute these scores in FP32." if many else f"That is within the usual {percent(limit)}."
        severity = "warning" if many else "info"
        spots = [Spot(name=n, since_step=0, value=shares[n]) for n in names]
        found.append(_finding(DecisionFlips.id, severity, names, evidence, meaning, advice, spots))
    return found


def _planned(
    view: View,
    question: Question,
    uniform: Plan,
    found: Sequence[Finding],
    subject: str,
    left_out: Sequence[str] | None,
) -> tuple[Plan | None, list[str]]:
    """Return the plan, or why there is none; the forward's if `left_out` is None."""
    if question.target is None:
        return None, [f"No plan: none has {question.title} for its target."]
    if not uniform.formats:
        return None, ["No plan: no module of the model multiplies matrices."]
    if left_out is not None:
        return replace(plan(view, question.target, exclude=left_out), source=subject), []
    faulty = _faulty(found)
    wide = "fp32" if question.name == "bf16" else "bf16"
    formats = {name: wide if name in faulty else fmt for name, fmt in uniform.formats.items()}
    kept = sum(name in faulty for name in formats)
    return Plan(
        target=uniform.target,
        source=subject,
        formats=formats,
        backward={name: fmt for name, fmt in uniform.backward.items() if name not in faulty},
        scales={name: table for name, table in uniform.scales.items() if name not in faulty},
        tolerance=uniform.tolerance,
        remarks=(f"{len(formats)} modules: {len(formats) - kept} in {question.title}, for the forward alone.",),
    ), []


def _from_plan(
    view: View, question: Question, made: Plan, modules: Sequence[Module], found: Iterable[Finding]
) -> tuple[list[Finding], list[str]]:
    """Return a finding of modules that the plan keeps wide, and the unknown ones."""
    judge = Judge(view, tolerance=forward.TOLERANCE, margin=None)
    named = _faulty(found)
    reasons: dict[str, str] = {}
    unknown: list[str] = []
    for module in modules:
        if module.opaque or made.formats.get(module.name) == question.forward.name:
            continue
        verdict = judge.verdict(module, question.forward.name, question.backward.name)
        if verdict.unknown:
            unknown.append(module.name)
        elif module.name not in named:
            reasons[module.name] = verdict.why or made.notes.get(module.name, "")
    if not reasons:
        return [], unknown
    first = next(iter(reasons))
    return [
        _finding(
            "no-scale", "warning", list(reasons), {"worst": first, "modules": len(reasons)},
            f"The plan keeps them wide. {first}: {reasons[first]}.", "Train with the plan.",
        )
    ], unknown  # fmt: skip


def _faulty(found: Iterable[Finding]) -> set[str]:
    return {module_of(f, name) for f in found if f.severity != "info" for name in f.where}


def _finding(
    rule: str, severity: Any, where: Sequence[str], evidence: Mapping[str, float | int | str], meaning: str,
    advice: str, spots: Sequence[Spot] = (),
) -> Finding:  # fmt: skip
    return Finding(
        rule=rule, severity=severity, since_step=0, until_step=0, where=tuple(where), spots=tuple(spots),
        evidence=evidence, meaning=meaning, advice=advice,
        figure="flips_heatmap" if rule == DecisionFlips.id else "heatmap",
    )  # fmt: skip


def _sorted(found: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))
