"""Modules that version 0.1 had elsewhere, so that its pickles still load.

A name of the old layout is imported when a pickle asks for it, never before.
"""

import importlib
import importlib.machinery
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# Pickles of converted and folded models, scalers and FP8 layers name records within them, so these are here too.
MOVED = {
    "diagnosis._divergence": "diagnosis.comparison.divergence",
    "diagnosis._fault": "diagnosis.locating.fault",
    "diagnosis._finding": "diagnosis.finding",
    "diagnosis._guard": "diagnosis.guard.guard",
    "diagnosis._guard_records": "diagnosis.guard.records",
    "diagnosis._locate_trigger": "diagnosis.locating.on_trigger",
    "diagnosis._plan_check": "diagnosis.planning.check",
    "diagnosis._rule": "diagnosis.rules.base",
    "diagnosis._view": "diagnosis.view",
    "diagnosis._whatif_result": "diagnosis.what_if.result",
    "diagnosis._windows": "diagnosis.estimates.usable_scales",
    "emulate._autocast": "emulate.autocast",
    "emulate._counts": "emulate.operation_counts",
    "emulate._emulation": "emulate.context",
    "emulate._lists": "emulate.casting",
    "formats._block": "formats.records",
    "formats._format": "formats.records",
    "formats._plan": "formats.precision_plan",
    "fp8._choice": "fp8.conversion",
    "fp8._linear": "fp8.linear",
    "fp8._recipe": "fp8.recipe",
    "kernels._backend": "kernels.backend",
    "precision._kahan": "precision.weights.bfloat16",
    "precision._levels": "precision.levels.catalogue",
    "precision._loop": "precision.training.loop",
    "precision._masters": "precision.weights.master_weights",
    "precision._policy": "precision.levels.policy",
    "precision._stochastic": "precision.weights.bfloat16",
    "report._summary": "report.verdicts.run_summary",
    "rounding._pack": "rounding.packing",
    "runs._casts": "runs.reading.module_casts",
    "runs._records": "runs.records",
    "runs._run": "runs.reading.run",
    "runs._sinks": "runs.sinks",
    "runs._sinks._mlflow": "runs.sinks.clients",
    "runs._sinks._tensorboard": "runs.sinks.tensorboard",
    "runs._sinks._wandb": "runs.sinks.clients",
    "runs._writer": "runs.writing.writer",
    "scaling._dynamic": "scaling.dynamic",
    "scaling._hysteresis": "scaling.dynamic",
    "scaling._layers": "scaling.layerwise.scaler",
    "scaling._outcome": "scaling.step",
    "scaling._saved": "scaling.state",
    "scaling._scaler": "scaling.base",
    "scaling._spectral": "scaling.spectral.scaler",
    "scaling._spectral_windows": "scaling.spectral.scale_windows",
    "scaling._spectral_rule": "scaling.spectral.rule",
    "scaling._static": "scaling.static",
    "scaling._trend": "scaling.spectral.rule",
    "spectrum._blocks": "spectrum.record",
    "spectrum._fit": "spectrum.fit.element_fit",
    "spectrum._source": "spectrum.source_format",
    "spectrum._spectrum": "spectrum.spectrum",
    "unit._audit_compare": "unit.auditing.result",
    "unit._audit_result": "unit.auditing.result",
    "unit._audit_rows": "unit.auditing.result",
    "unit._build_inputs": "unit.conversion.codegen.forward_signature",
    "unit._build_signature": "unit.conversion.codegen.forward_signature",
    "unit._build_steps": "unit.conversion.codegen.steps",
    "unit._changes": "unit.changes",
    "unit._converted": "unit.conversion.converted_modules",
    "unit._fold_plan": "unit.conversion.converted_modules",
    "unit._formulas": "unit.formulas",
    "unit.nn._activations": "unit.nn.functions",
    "unit.nn._attention": "unit.nn.transformer",
    "unit.nn._convolutions": "unit.nn.convolutions",
    "unit.nn._dropout": "unit.nn.functions",
    "unit.nn._embedding": "unit.nn.layers",
    "unit.nn._linear": "unit.nn.layers",
    "unit.nn._losses": "unit.nn.functions",
    "unit.nn._mlp": "unit.nn.blocks",
    "unit.nn._norms": "unit.nn.layers",
    "unit.nn._pools": "unit.nn.convolutions",
    "unit.nn._residual": "unit.nn.blocks",
    "unit.nn._transformer": "unit.nn.transformer",
    "unit.optim._optimizers": "unit.optim.optimizers",
    "watch._casting": "watch.taps.cast_counts",
    "watch._watch": "watch.handle",
}


class Finder:
    """Finder and loader that gives an old layout's module the new one's content."""

    # Without the base classes of `importlib.abc`, whose import would be a tenth of the time of `plimsoll --help`.

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the modules of the table."""
        package, _, name = fullname.partition(".")
        if package != "plimsoll" or name not in MOVED:
            return None
        loader: Any = self  # which is one by its methods
        return importlib.machinery.ModuleSpec(fullname, loader, is_package=True)  # some had modules below them

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module: what pickles look up in it are the classes that are there now."""
        new = importlib.import_module(f"plimsoll.{MOVED[module.__name__.removeprefix('plimsoll.')]}")
        module.__dict__.update({name: value for name, value in vars(new).items() if not name.startswith("__")})
