"""The evidence base: its rows, and the recorded outcomes of experiments."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from plimsoll.errors import RunError
from plimsoll.runs.storage.atomic_files import replacing
from plimsoll_lab.result import Claim, Result
from plimsoll_lab.results_folder import RESULT

# -- rows: earlier reports, and what in Plimsoll shows them ------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: `id`, sentence, test files that show it, and what needs a GPU."""

    id: str
    says: str
    tests: tuple[str, ...] = ()
    gpu: str = ""


_ROWS = (
    Row(
        id="T1", says="A hook collects summaries of weights, gradients, losses, inputs, outputs and optimizer state.",
        tests=("watch/test_taps.py", "watch/test_parameters.py", "runs/sinks/test_tensorboard.py"),
    ),
    Row(
        id="T2", says="FP16 holds 5.96e-8 to 65,504; BF16 has FP32's range; TF32 is 19 bits.",
        tests=("formats/test_catalogue.py", "emulate/test_sixteen_bits.py"),
    ),
    Row(
        id="T3", says="The stock scaler sees overflow only: after hard batches its scale is low, gradients are zero.",
        tests=("scaling/test_gradscaler.py", "diagnosis/test_faults.py"),
    ),
    Row(id="T4", says="CLIP, ten hard batches at step 300: FP16's gradients become zero, BF16 goes on."),
    Row(id="T5", says="Underflow over time: CLIP in FP16 5 to 20 % of layers, rising; a detector, BF16 below 1 %."),
    Row(
        id="T6", says="The early rule: below 1 % and flat, stay; 5 to 10 % and rising by step 1,000, change to BF16.",
        tests=("diagnosis/test_rules.py",),
    ),
    Row(
        id="T7", says="A higher initial scale or a shorter interval does not help; a scale per layer or parameter may.",
        tests=("scaling/test_layers_exact.py",),
    ),
    Row(
        id="T8", says="Adam in FP16: epsilon 1e-8 is zero, second moments vanish, an update explodes after zeros.",
        tests=("precision/test_remedies_adam.py",),
    ),
    Row(
        id="T9", says="Deep T5: values add up past 65,504 to Inf; clamping them has a negligible effect.",
        tests=("precision/test_remedies_clamp.py",),
    ),
    Row(
        id="T10", says="BF16 is one changed argument, TF32 two lines; TF32's rate is half of FP16's, above FP32's.",
        tests=("precision/test_prepare_tf32.py",), gpu="the rates",
    ),
    Row(
        id="U1", says="Every tensor begins at unit scale; FP16 and FP8 train with no loss scale.",
        tests=("unit/nn/test_training.py", "unit/convert/test_training.py"),
    ),
    Row(
        id="U2", says="A factor for each operation, by formula or measured; shared off cut edges; weighted additions.",
        tests=("unit/test_formulas.py", "unit/analysis/test_rules.py"),
    ),
    Row(
        id="U3", says="From scaled(x, alpha, beta): projection, GELU, LayerNorm, a feed-forward network.",
        tests=("unit/test_scaled.py", "unit/functional/test_scales.py", "unit/nn/test_modules.py"),
    ),
    Row(
        id="U4", says="FP8: operands of products are cast, E4 forward and E5 backward; nothing else changes.",
        tests=("fp8/test_linear.py", "fp8/test_product.py"), gpu="the speed of FP8 products",
    ),
    Row(id="U5", says="Factors are fixed and scales drift: the headroom suffices; 0.2 % more operations."),
    Row(id="U6", says="2,092 character models, and BERT: FP16 fails alone; unit scaling is as good as FP32."),
    Row(
        id="U7", says="Its rivals: static and automatic loss scales, and scales per tensor at run time.",
        tests=("scaling/test_spectral.py", "fp8/test_scales.py"), gpu="what scales per tensor cost",
    ),
    Row(
        id="A1", says="Five changed lines: autocast and a scaler; which operations run low, and which stay high.",
        tests=("emulate/test_autocast.py", "emulate/test_lists.py"),
    ),
    Row(
        id="A2", says="The scaler has state, which belongs in the checkpoint; underflow it does not see.",
        tests=("scaling/test_state.py", "precision/test_prepare_checkpoint.py"),
    ),
    Row(
        id="A3", says="Several GPUs; some 5 % of updates lie below 2^-24; binary cross-entropy takes logits.",
        tests=("scaling/distributed/test_ranks.py", "emulate/test_autocast.py", "diagnosis/test_swallowed.py"),
    ),
    Row(
        id="A4", says="Three networks, time and memory, with losses that agree: tabular, UNet, BERT-base.",
        gpu="times and device memory",
    ),
    Row(id="N1", says="Three techniques: FP32 accumulation, loss scaling, FP32 master weights."),
    Row(
        id="N2", says="The iteration by hand: FP16 copy, scaled loss, unscaled gradients, FP32 update, copy back.",
        tests=("precision/test_by_hand.py",),
    ),
    Row(id="N3", says="In an SSD detector 66.8 % of activation gradients are zero; a scale of 8 is enough."),
    Row(id="N4", says="A large LSTM language model diverges without loss scaling, and lies on FP32's curve with it."),
    Row(
        id="N5", says="The scale: a constant, by statistics below 65,504, or searched for; clip after unscaling.",
        tests=("scaling/test_rule.py", "scaling/test_spectral_rule.py", "precision/test_prepare.py"),
    ),
    Row(
        id="N6", says="Losses are computed in FP32; inference in FP16 takes less memory and time.",
        tests=("emulate/test_lists.py", "precision/test_levels.py"), gpu="the time of inference",
    ),
    Row(id="X1", says="FP64, FP32 and FP16: fields, limits, rounding.", tests=("formats/test_oracles.py",)),
    Row(
        id="X2", says="Master weights cost memory; activations take several times the static memory: the total halves.",
        tests=("precision/test_compact.py",),
    ),
    Row(id="X3", says="In one network 68 % of activation gradients are zero, 4 % lie in 2^-32 to 2^-20."),
    Row(
        id="X4", says="The dynamic scale begins high, halves on overflow, grows every 2,000 clean steps, ends higher.",
        tests=("scaling/test_rule.py", "scaling/test_gradscaler.py", "lab/test_rows.py"),
    ),
    Row(
        id="X5", says="Levels O0 to O3; the lists of operations are a user's to change.",
        tests=("precision/test_levels.py", "precision/test_policy.py"),
    ),
    Row(
        id="X6", says="Gradients of half the width halve communication.", tests=("precision/test_communication.py",),
        gpu="the time that it saves",
    ),
    Row(id="X7", says="Accuracy in mixed precision equals FP32's; the loss scale's effect on one training."),
    Row(
        id="X8", says="The best precision may change over a run: a schedule of precisions.",
        tests=("precision/test_schedule.py",),
    ),
    Row(
        id="E1", says="BF16 flash attention: where scores tie, P V rounds one way; that adds up in the weights.",
    ),
    Row(id="E2", says="MX: the weights of a norm that lie close end in one bin, and bias the gradients of all layers."),
    Row(id="E3", says="FP4 training is less effective where the gradient is below sqrt(3) times its rounding noise."),
)  # fmt: skip

ROWS = {row.id: row for row in _ROWS}


# -- outcomes, in a folder of results or in the packaged record --------------------------------------------------------

RECORD = "recorded.json"  # in the package: how the experiments ended when they were last recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an experiment.

    - `claims`: how many it has; `failed`: those that do not hold, as one line each.
    - `error`: why it was not carried out, empty where it was. `seconds`: how long it took.
    - `rows`: by row of the evidence base how many claims are of it, and of these the lines of those that do not hold.
      Empty in records of before claims had rows: then all are of every row of the experiment.
    - `date`, `device`, `versions`: when, on what and with what.
    """

    experiment: str
    claims: int = 0
    failed: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    date: str = ""
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    rows: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict[str, "tuple[int, tuple[str, ...]]"])

    def of_row(self, row: str) -> "Outcome":
        """Return the part of the outcome that belongs to the row."""
        if not self.rows:
            return self
        claims, failed = self.rows.get(row, (0, ()))
        return replace(self, claims=claims, failed=failed, rows={row: (claims, failed)})

    @property
    def holds(self) -> bool:
        """True if it has run, and all of its claims hold."""
        return not self.error and self.claims > 0 and not self.failed

    @property
    def state(self) -> str:
        """The state in words: all claims hold, how many do not, or not carried out."""
        if self.error:
            return "not carried out"
        if self.failed:
            return f"{len(self.failed)} of {self.claims} claims do not hold"
        return f"{self.claims} claims hold" if self.claims != 1 else "1 claim holds"

    @classmethod
    def of(cls, result: Result) -> "Outcome":
        """Return the outcome of the result."""
        claims = result.measured.claims
        return cls(
            experiment=result.experiment, claims=len(claims), failed=tuple(str(c) for c in claims if not c.holds),
            seconds=round(result.seconds, 1), date=result.date, device=result.device, versions=dict(result.versions),
            rows=_by_row(result.source, claims),
        )  # fmt: skip

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `asdict` gave, from JSON."""
        given = dict(record)
        rows = {row: (claims, tuple(failed)) for row, (claims, failed) in given.pop("rows", {}).items()}
        return cls(failed=tuple(given.pop("failed")), rows=rows, **given)


def recorded() -> dict[str, Outcome]:
    """Return the packaged outcomes of the maintainers' machine, by experiment."""
    text = (resources.files("plimsoll_lab") / RECORD).read_text(encoding="utf-8")
    return _by_name(Outcome.from_dict(record) for record in json.loads(text))


def found_in(folder: Path) -> dict[str, Outcome]:
    """Return the outcomes of the results in a folder, as `perform_all` leaves them.

    Raises `RunError` where there is no such folder, or a result in it cannot be read.
    """
    if not folder.is_dir():
        raise RunError(
            f"lab: expected a folder of results; got {folder}, which does not exist. Make it: plimsoll lab --all."
        )
    return _by_name(_read(path) for path in sorted(folder.glob(f"*/{RESULT}")))


def save(outcomes: Iterable[Outcome], path: Path) -> None:
    """Writes them as one file of JSON, whole or not at all."""
    with replacing(path) as file:
        file.write((json.dumps([asdict(each) for each in outcomes], indent=1, allow_nan=False) + "\n").encode())


def _read(path: Path) -> Outcome:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        claims = [_claim(each) for each in record["claims"]]
        return Outcome(
            experiment=record["experiment"], claims=len(claims), failed=tuple(str(c) for c in claims if not c.holds),
            seconds=round(record["seconds"], 1), date=record["date"], device=record["device"],
            versions=record["versions"], rows=_by_row(record["source"], claims),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"lab: expected the result of an experiment; got {path} ({type(error).__name__}: {error}). "
            "Carry it out again, or remove the file."
        ) from error


def _claim(record: Mapping[str, Any]) -> Claim:
    names = ("id", "says", "at_least", "at_most", "unit")
    rows = tuple(record.get("rows", ()))  # of a result of before claims had any: all of the experiment's
    return Claim(measured=float(record["measured"]), rows=rows, **{name: record[name] for name in names})


def _by_row(source: str, claims: Sequence[Claim]) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Return each row's number of claims, and those that do not hold."""
    own = {row: [claim for claim in claims if not claim.rows or row in claim.rows] for row in rows_of(source)}
    return {row: (len(these), tuple(str(c) for c in these if not c.holds)) for row, these in own.items()}


def rows_of(source: str) -> tuple[str, ...]:
    """The rows that an experiment names as its source: "T3, T4" are two."""
    return tuple(part.strip() for part in source.split(","))


def _by_name(outcomes: Iterable[Outcome]) -> dict[str, Outcome]:
    return {outcome.experiment: outcome for outcome in outcomes}
