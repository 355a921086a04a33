"""Writes evidence.md: every row of the evidence base with what stands for it, from the outcomes that were recorded.

python docs/evidence.py       after `make lab`, which does it itself
"""

from pathlib import Path

from plimsoll_lab import EXPERIMENTS, Experiment, Outcome, Standing, recorded, standings

PAGE = Path(__file__).with_name("evidence.md")
_HEAD = """# The evidence

What earlier work has reported of low precision, row by row, and where Plimsoll stands with each: the
[experiments](reference/lab.md) that reproduce it, and tests of what is no experiment. *Holds*: all claims of the
row do, at the size that was run. *Holds in part*: some do not, and are named. *Tested*: an interface or a rule,
for which tests stand.

`plimsoll lab --list` prints the same; `plimsoll lab --all` carries all experiments out again, and `make lab` writes
this page. T: the tensor collection hook and the limits of mixed precision. U: unit scaling. A: automatic mixed
precision. N: the method, step by step. X: levels and the accounting of memory. E: bias and noise of rounding.
"""


def page() -> str:
    """The page's text."""
    outcomes = recorded()
    rows = "\n".join(_row(standing) for standing in standings(outcomes))
    made = "\n".join(_experiment(experiment, outcomes.get(experiment.name)) for experiment in EXPERIMENTS.values())
    dates = sorted({outcome.date for outcome in outcomes.values()})
    machines = sorted(
        {f"{o.versions.get('machine', '?')}, torch {o.versions.get('torch', '?')}" for o in outcomes.values()}
    )
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    return (
        f"{_HEAD}\n| row | what it says | state | what stands for it |\n|---|---|---|---|\n{rows}\n\n"
        f"## The experiments\n\nAll of them took {minutes:.0f} minutes ({'; '.join(machines)}; {', '.join(dates)}).\n\n"
        f"| experiment | claim | rows | state | time |\n|---|---|---|---|---|\n{made}\n"
    )


def _row(standing: Standing) -> str:
    shown = [
        f"`lab {name}`: {standing.outcomes[name].state if name in standing.outcomes else 'not carried out'}"
        for name in standing.experiments
    ]
    shown += [f"`tests/{test}`" for test in standing.row.tests]
    shown += [f"*does not hold:* {line}" for outcome in standing.outcomes.values() for line in outcome.failed]
    shown += [f"*not measured yet, for want of a GPU:* {standing.unmeasured}"] if standing.unmeasured else []
    return f"| {standing.row.id} | {standing.row.says} | {standing.state} | {'<br>'.join(shown)} |"


def _experiment(experiment: Experiment, outcome: Outcome | None) -> str:
    how = f"{outcome.state} | {_time(outcome.seconds)}" if outcome else "not carried out | "
    return f"| `{experiment.name}` | {experiment.claim} | {experiment.source} | {how} |"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


if __name__ == "__main__":
    PAGE.write_text(page())
