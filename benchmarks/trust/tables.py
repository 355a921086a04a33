"""Tables of verdicts: rates on healthy runs, recall on faults, contradictions."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks._harness import Results
from benchmarks.trust.judge import OUTCOMES, Verdict
from benchmarks.trust.registry import FAULTS, KINDS, cases

Row = dict[str, object]
Chosen = Callable[[Verdict], bool]
PARTS: tuple[tuple[str, Chosen], ...] = (
    ("seen while rules were tuned", lambda v: not v.held_back),
    ("held back", lambda v: v.held_back),
    ("all", lambda v: True),
)
GOAL = "The goal: a warning on at most 3 % of healthy runs, an alarm on none; 45 of 53 faults named, none misleading."


def loud(verdict: Verdict) -> bool:
    """Whether a run got a warning or an alarm."""
    return verdict.worst in {"warning", "alarm"}


def percent(part: int, whole: int) -> str:
    """A share in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def rates(verdicts: Sequence[Verdict]) -> Row:
    """How many healthy runs there are, and how many of them are warned of."""
    warned = sum(loud(v) for v in verdicts)
    return {
        "runs": len(verdicts),
        "with a warning or alarm": warned,
        "share": percent(warned, len(verdicts)),
        "with an alarm": sum(v.worst == "alarm" for v in verdicts),
    }


def recall(verdicts: Sequence[Verdict]) -> Row:
    """How many faults were found, and how."""
    found = Counter(v.outcome for v in verdicts)
    row: Row = {"faults": len(verdicts)} | {outcome: found[outcome] for outcome in OUTCOMES}
    return row | {"share named": percent(found["named"], len(verdicts))}


def results_of(verdicts: Sequence[Verdict]) -> Results:
    """All tables, printed."""
    results = Results("Trust", "cpu")
    sound = [v for v in verdicts if v.healthy and v.unsound is None]
    faults = [v for v in verdicts if not v.healthy]
    left = [v for v in verdicts if v.unsound is not None]
    if sound:
        _healthy(results, sound, left)
    if faults:
        _faults(results, faults)
    met = [(name, v) for v in verdicts for name in v.contradictions]
    rows: list[Row] = [
        {"findings that contradict each other": name, "runs": len(of), "of": ", ".join(sorted({v.kind for v in of}))}
        for name in dict.fromkeys(name for name, _ in met)
        for of in [[v for n, v in met if n == name]]
    ]
    none: list[Row] = [{"findings that contradict each other": "none", "runs": 0, "of": ""}]
    results.add("Contradictions", "Pairs of findings of one run, over both sets.", rows or none)
    return results


def _healthy(results: Results, sound: Sequence[Verdict], left: Sequence[Verdict]) -> None:
    of_due = f"{len(sound) + len(left)} of {sum(1 for _ in cases('healthy'))} runs are recorded"
    note = f"{GOAL} {len({v.kind for v in sound})} kinds; {of_due}. Left out, as their training did not do what it "
    note += f"should: {', '.join(f'{v.kind}-{v.precision}-{v.seed}' for v in left) or 'none'}."
    results.add("Healthy runs", note, [{"part": n} | rates([v for v in sound if of(v)]) for n, of in PARTS])
    precisions = [{"precision": p} | rates([v for v in sound if v.precision == p]) for p in ("fp32", "bf16", "fp16")]
    results.add("Healthy runs, by precision", "FP16 is emulated, with a loss scaler.", precisions)
    said = Counter((rule, v) for v in sound for rule in {r for severity, r, _ in v.lines if severity != "info"})
    rules = sorted({rule for rule, _ in said}, key=lambda r: -sum(1 for rule, _ in said if rule == r))
    rows: list[Row] = [
        {"rule": r, "runs": sum(1 for rule, _ in said if rule == r), "kinds": len({v.kind for x, v in said if x == r})}
        for r in rules
    ]
    results.add("Healthy runs, by rule", "Warnings and alarms.", rows or [{"rule": "none", "runs": 0, "kinds": 0}])
    kinds: list[Row] = []
    for kind in dict.fromkeys(v.kind for v in sound):
        mine = [v for v in sound if v.kind == kind]
        loudest = Counter(r for v in mine for r in {rule for severity, rule, _ in v.lines if severity != "info"})
        kinds.append(
            {
                "kind": kind,
                "what it is": (KINDS[kind].train.__doc__ or "").split("\n")[0],
                "part": "held back" if mine[0].held_back else "seen",
                "runs": len(mine),
                "warned": sum(loud(v) for v in mine),
                "alarms": sum(v.worst == "alarm" for v in mine),
                "by": ", ".join(f"{rule} {n}" for rule, n in loudest.most_common()),
            }
        )
    results.add("Healthy runs, by kind", "Up to three precisions and two seeds of each.", kinds)


def _faults(results: Results, faults: Sequence[Verdict]) -> None:
    note = "Named: a warning or alarm says the cause. Flagged: something is said, not the cause. "
    note += "Misleading: the headline says another cause."
    results.add("Faults", note, [{"part": name} | recall([v for v in faults if of(v)]) for name, of in PARTS])
    rows: list[Row] = [
        {
            "fault": v.kind,
            "what is planted": FAULTS[v.kind].says,
            "precision": v.precision,
            "part": "held back" if v.held_back else "seen",
            "found": v.outcome,
            "headline": next((f"{severity}: {rule}" for severity, rule, _ in v.lines if severity != "info"), "-"),
        }
        for v in faults
    ]
    note = "The headline is the finding that the verdict is about, which `plimsoll check` lists first."
    results.add("Faults, one by one", note, rows)


def print_lines(verdicts: Sequence[Verdict]) -> None:
    """Every finding of some runs."""
    for v in verdicts:
        state = v.outcome or ("not sound: " + v.unsound if v.unsound else "warned" if loud(v) else "silent")
        print(f"== {v.kind}-{v.precision}-{v.seed}: {state}")
        for _, _, line in v.lines:
            print(f"   {line}")
        for name in v.contradictions:
            print(f"   CONTRADICTION: {name}")


def write_failures(path: Path, verdicts: Sequence[Verdict]) -> None:
    """The runs of the tuned part that went wrong, each with what was said; of the part held back only rates."""
    sound = [v for v in verdicts if v.healthy and v.unsound is None]
    lines = ["# What is wrong", ""]
    for name, of in PARTS:
        mine, faults = [v for v in sound if of(v)], [v for v in verdicts if not v.healthy and of(v)]
        lines.append(f"- {name}: healthy {rates(mine)}; {recall(faults)}")
    lines += ["", "## Healthy runs with a warning or alarm", ""]
    for v in sound:
        if loud(v) and not v.held_back:
            lines.append(f"### {v.kind}-{v.precision}-{v.seed}")
            lines += [f"- {line}" for severity, _, line in v.lines if severity != "info"]
    for outcome in ("misleading", "missed", "flagged"):
        lines += ["", f"## Faults {outcome}", ""]
        for v in verdicts:
            if v.outcome == outcome and not v.held_back:
                lines.append(f"### {v.kind}-{v.precision}-{v.seed}: {FAULTS[v.kind].says}")
                lines.append(f"named when a line matches `{FAULTS[v.kind].named.pattern}`")
                lines += [f"- {line}" for _, _, line in v.lines]
    lines += ["", "## Contradictions", ""]
    lines += [f"- {v.kind}-{v.precision}-{v.seed}: {n}" for v in verdicts if not v.held_back for n in v.contradictions]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
