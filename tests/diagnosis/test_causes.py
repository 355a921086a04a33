"""Findings that another one explains, and that no two findings of one run contradict each other."""

import math
from collections.abc import Callable, Sequence

import torch

from plimsoll.diagnosis import RULES, Finding, Spot, diagnose
from plimsoll.diagnosis.run_rules import unexplained
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS, INF, INNOCENT, NAN, A, B, put
from tests.support.diagnosis.recorded import ONE_WORKER, Recorded
from tests.support.diagnosis.stories import Story, constant, make_story

pytestmark = ONE_WORKER

RULES_BY_ID = {rule.id: rule for rule in RULES}
FROM_NAN = {rule.id for rule in RULES if "nonfinite" in rule.explained_by}
TROUBLED = {
    "gradients are NaN": make_story(
        scale=lambda s: None, gradient_fmt="fp32",
        change_gradient=lambda g, layer, s: torch.where(torch.arange(len(g)) == 0, NAN, 0.0) if s >= 50 else g,
    ),
    "weights are NaN": make_story(
        change_weight=put(NAN, A, 40), loss=lambda s: 2.0 if s < 40 else NAN,
        change_gradient=lambda g, layer, s: g if s < 60 else g * 0,
    ),
    "every step is skipped for NaN": make_story(
        scale=lambda s: 1024.0 * 2.0 ** -min(max(s - 30, 0), 30), skipped=lambda s: float(s >= 30),
        change_activation=put(NAN, A, 30), gradient_std=constant(2.0**-20),
    ),
    "infinities in one layer, from which it drifts": make_story(
        change_activation=put(INF, B, 30), activation_fmt="bf16",
        activation_std=lambda layer, s: 2.0 ** (0.06 * max(s - 30, 0)),
    ),
    "solved": make_story(
        loss=lambda s: 2.0 if s < 50 else 0.0, change_gradient=lambda g, layer, s: g * (s < 50), gradient_fmt="fp32"
    ),
}  # fmt: skip


def finding(rule: str, severity: str = "warning", names: Sequence[str] = (), since: int = 0, until: int = 9) -> Finding:
    return Finding(
        rule=rule, severity=severity, since_step=since, until_step=until, advice="a.", meaning="m.", figure="record",
        where=tuple(names), spots=tuple(Spot(name=n, since_step=since, value=1.0) for n in names),
    )  # fmt: skip


def contradictions(found: list[Finding]) -> list[tuple[str, str]]:
    """Pairs of findings that cannot both be right, or send the reader two ways."""
    serious = [f for f in found if f.severity != "info"]
    broken = [f for f in serious if f.rule == "nonfinite"]
    pairs = [(f.rule, "nonfinite") for f in serious for n in broken
             if f.rule in FROM_NAN and n.since_step <= f.since_step <= n.until_step]  # fmt: skip
    flushed = [f for f in serious if f.rule in ("underflow-high", "cast-flushes")]
    modules = {id(f): {n.partition(":")[0].removesuffix(".weight") for n in f.where} for f in serious}
    pairs += [("dead-layer", f.rule) for d in serious for f in flushed if d.rule == "dead-layer"
              and modules[id(d)] & modules[id(f)] and f.since_step <= d.since_step <= f.until_step]  # fmt: skip
    small = [f for f in serious if f.rule == "activation-growth" and float(f.evidence["absmax"]) < 1024]
    rising = [f for f in serious if "raise_scale" in f.actions and f.rule == "scale-low"]
    lowering = [f for f in serious if "lower_scale" in f.actions and f.rule.startswith("scale")]
    pairs += [("activation-growth", "small values") for _ in small]
    return pairs + [("scale-low", f.rule) for r in rising for f in lowering if f.since_step <= r.since_step]


@each("name", [*TROUBLED, *(f.name for f in FAULTS), *INNOCENT])
def test_no_two_findings_contradict_each_other(name: str, recorded: Callable[[Story], Recorded]) -> None:
    stories: dict[str, Story] = TROUBLED | {f.name: f.story for f in FAULTS} | INNOCENT
    found = recorded(stories[name]).found
    assert contradictions(found) == [], [str(f) for f in found]
    assert all(math.isfinite(f.since_step) for f in found)


def test_what_follows_from_nan_is_not_reported_beside_it(recorded: Callable[[Story], Recorded]) -> None:
    for name in ("gradients are NaN", "weights are NaN", "every step is skipped for NaN"):
        found = recorded(TROUBLED[name]).found
        assert "nonfinite" in {f.rule for f in found if f.severity == "alarm"}
        assert {f.rule for f in found if f.severity != "info"} & {"dead-layer", "scale-low"} == set()


def test_gradients_of_a_loss_of_zero_are_no_dead_layer(recorded: Callable[[Story], Recorded]) -> None:
    assert "dead-layer" not in {f.rule for f in recorded(TROUBLED["solved"]).found}


def test_a_cause_counts_though_its_rule_was_not_asked_for(recorded: Callable[[Story], Recorded]) -> None:
    path = recorded(TROUBLED["every step is skipped for NaN"]).path
    assert diagnose(path, rules=["scale-low", "dead-layer"]) == []


def test_layers_that_a_cause_names_are_left_out_and_others_stay() -> None:
    dead = finding("dead-layer", names=["a.0:output", "b:output"], since=3)
    (left, cause) = unexplained([dead, finding("cast-flushes", names=["a.0.weight"])], RULES_BY_ID)
    assert (left.rule, left.where, cause.rule) == ("dead-layer", ("b:output",), "cast-flushes")
    (alone,) = unexplained([finding("dead-layer", names=["a:output"]), finding("cast-flushes", names=["a:output"])],
                           RULES_BY_ID)  # fmt: skip
    assert alone.rule == "cast-flushes"


@each(
    "cause",
    [
        finding("nonfinite", severity="info"),
        finding("nonfinite", severity="alarm", since=5),  # later
        finding("nonfinite", severity="alarm", until=1),  # over by then
        finding("loss-spike", severity="alarm"),
    ],
)
def test_what_is_no_cause_explains_nothing(cause: Finding) -> None:
    dead = finding("dead-layer", names=["a:output"], since=3)
    assert unexplained([dead, cause], RULES_BY_ID) == [dead, cause]


def test_every_cause_is_a_rule() -> None:
    assert {cause for rule in RULES for cause in rule.explained_by} <= set(RULES_BY_ID)
