"""What a guard chooses: on new evidence, one thing at a time, within limits, and the next where one does not help."""

import pytest

from plimsoll.diagnosis import Finding, Limits, Look
from plimsoll.diagnosis.finding import Action
from plimsoll.diagnosis.guard.decisions import ActionChooser, chain
from plimsoll.diagnosis.guard.records import ACTIONS, Act, Order
from plimsoll.errors import ArgumentError
from tests.support.cases import each

UNDERFLOW = ("raise_scale", "layer_scale", "to_bf16")


def finding(
    rule: str = "underflow-high",
    *,
    since: int = 0,
    until: int,
    actions: tuple[Action, ...] = UNDERFLOW,
    severity: str = "alarm",
    collection: str | None = "gradients",
) -> Finding:
    return Finding(
        rule=rule, severity=severity, since_step=since, until_step=until, actions=actions, collection=collection,
        advice="", meaning="", figure="scale_window",
    )  # fmt: skip


def look(step: int, *findings: Finding) -> Look:
    """At every step everything was recorded."""
    return Look(step=step, findings=findings, newest={"": step, "gradients": step, "activations": step})


class Proposer:
    """Proposes whatever is asked, but what is impossible; keeps what it was asked."""

    def __init__(self, *impossible: str, targets: tuple[str, ...] = ("it",)) -> None:
        self.impossible, self.targets = impossible, targets
        self.asked: list[tuple[str, int, int]] = []

    def __call__(self, action: Action, found: Finding, since: int, tries: int) -> Order | str:
        self.asked.append((action, since, tries))
        if action in self.impossible:
            return "it cannot be"
        return Order(
            action=action, rule=found.rule, where=(), since_step=since, before=None, after=None, reason="",
            targets=self.targets,
        )  # fmt: skip


def chooser(
    *allowed: Action, dry_run: bool = False, begin: int = 0, severity: str = "warning", **limits: int
) -> ActionChooser:
    return ActionChooser(allowed or ACTIONS, Limits(**limits), begin, severity, dry_run=dry_run)


def taken(chooser: ActionChooser, looks: list[Look], propose: Proposer | None = None) -> list[tuple[int, str]]:
    """The steps after which something was done, and what."""
    found = []
    for look in looks:
        order, _ = chooser.choose(look, look.step + 1, propose or Proposer())
        if order is not None:
            found.append((look.step + 1, order.action))
    return found


def lasting(steps: range, **facts: object) -> list[Look]:
    """A finding that holds at every step."""
    return [look(step, finding(until=step, **facts)) for step in steps]


def test_the_first_action_that_is_allowed_and_possible_is_taken() -> None:
    at_once = lasting(range(10, 11))
    assert taken(chooser(), at_once) == [(11, "raise_scale")]
    assert taken(chooser("to_bf16", "layer_scale"), at_once) == [(11, "layer_scale")]
    assert taken(chooser(), at_once, Proposer("raise_scale", "layer_scale")) == [(11, "to_bf16")]
    assert taken(chooser("skip"), at_once) == []


def test_an_action_is_not_repeated_within_its_steps() -> None:
    """And what it waits for is not another action."""
    assert taken(chooser(steps=100, tries=9), lasting(range(10, 260, 10))) == [
        (11, "raise_scale"), (111, "raise_scale"), (211, "raise_scale"),
    ]  # fmt: skip


def test_what_does_not_help_is_followed_by_the_next_and_at_last_by_stop() -> None:
    done = taken(chooser(steps=20, tries=2), lasting(range(10, 400, 10)))
    assert [action for _, action in done] == [
        *["raise_scale"] * 2,
        *["layer_scale"] * 2,
        *["to_bf16"] * 2,
        *["stop"] * 2,
    ]


def test_a_warning_never_comes_to_stop() -> None:
    done = taken(chooser(steps=10, tries=1), lasting(range(10, 400, 10), severity="warning"))
    assert [action for _, action in done] == ["raise_scale", "layer_scale", "to_bf16"]


def test_nothing_is_done_about_what_is_less_than_the_severity() -> None:
    assert taken(chooser(severity="alarm"), lasting(range(10, 200, 10), severity="warning")) == []


def test_a_finding_that_is_over_is_left_alone_and_its_actions_begin_anew() -> None:
    over = [look(step, finding(until=11)) for step in range(20, 200, 10)]
    assert taken(chooser(steps=10, tries=1), over) == [(21, "raise_scale")]  # new at the first look, and never again
    again = [look(step, finding(until=step)) for step in range(200, 240, 10)]
    done = taken(chooser(steps=10, tries=1), [look(10, finding(until=10)), *over, *again])
    assert done[0] == (11, "raise_scale")
    assert done[1] == (201, "raise_scale")  # it has helped the first time


def test_evidence_from_before_an_act_is_no_reason_for_another() -> None:
    chosen = chooser(steps=1, tries=9)
    assert taken(chosen, [look(10, finding(until=10))]) == [(11, "raise_scale")]
    assert taken(chosen, [look(11, finding(until=11))]) == []  # step 11 had ended when the scale rose
    assert taken(chosen, [look(12, finding(until=12))]) == [(13, "raise_scale")]


def test_a_look_without_anything_new_proves_nothing() -> None:
    """A collection that is recorded every 50 steps is neither worse nor over in between."""
    chosen = chooser(steps=1, tries=1)
    stale = Look(step=20, findings=(finding(until=10),), newest={"": 20, "gradients": 10})
    assert taken(chosen, [look(10, finding(until=10)), stale, stale, look(60, finding(until=60))]) == [
        (11, "raise_scale"), (61, "layer_scale"),
    ]  # fmt: skip


def test_what_lies_before_the_guard_began_is_no_reason() -> None:
    assert taken(chooser(begin=100), [look(110, finding(since=3, until=60))]) == []
    asked = Proposer()
    taken(chooser(begin=100), [look(110, finding(since=3, until=110))], asked)
    assert asked.asked == [("raise_scale", 100, 0)]  # a checkpoint of this session's beginning is good


def test_since_when_it_holds_is_counted_from_when_it_last_did_not() -> None:
    asked = Proposer()
    looks = [
        look(10, finding(since=4, until=10)),
        look(20, finding(since=4, until=9)),
        look(30, finding(since=4, until=28)),
    ]
    taken(chooser(steps=1), looks, asked)
    assert [since for _, since, _ in asked.asked] == [4, 21]


def test_one_thing_at_a_look() -> None:
    several = look(10, finding(until=10), finding("nonfinite", until=10, actions=("skip",), collection=None))
    assert taken(chooser(), [several]) == [(11, "raise_scale")]
    assert taken(chooser("skip"), [several]) == [(11, "skip")]


def test_raising_and_lowering_count_as_one() -> None:
    down = finding("scale-oscillation", until=20, actions=("lower_scale",), collection=None)
    chosen = chooser(steps=100)
    assert taken(chosen, [look(10, finding(until=10)), look(20, down)]) == [(11, "raise_scale")]


def test_other_targets_have_limits_of_their_own() -> None:
    chosen = chooser("to_bf16", steps=100, tries=9)
    assert taken(chosen, [look(10, finding(until=10))], Proposer(targets=("a",))) == [(11, "to_bf16")]
    assert taken(chosen, [look(20, finding(until=20))], Proposer(targets=("b",))) == [(21, "to_bf16")]
    assert taken(chosen, [look(30, finding(until=30))], Proposer(targets=("b", "c"))) == []


def test_no_action_is_taken_more_often_than_its_total() -> None:
    every_other = [look(s, finding(until=s)) if s % 20 else look(s, finding(until=s - 10)) for s in range(10, 2000, 10)]
    assert len(taken(chooser("raise_scale", steps=1, total=3), every_other)) == 3


def test_why_nothing_can_be_done_is_told() -> None:
    def helpless(chosen: ActionChooser, *findings: Finding, **proposer: object) -> dict[str, str]:
        return chosen.choose(look(10, *findings), 11, Proposer("raise_scale"))[1]

    assert helpless(chooser("raise_scale"), finding(until=10)) == {"underflow-high": "raise_scale: it cannot be"}
    nothing = {"underflow-high": "no action that would help is allowed"}
    assert helpless(chooser("skip"), finding(until=10)) == nothing
    assert helpless(chooser("skip"), finding(until=10, severity="warning")) == {}
    assert helpless(chooser(), finding("dead-layer", until=10, actions=(), severity="warning")) == {}


def test_a_dry_run_says_what_it_would_do_once() -> None:
    chosen = chooser(dry_run=True, steps=1)
    assert taken(chosen, lasting(range(10, 100, 10))) == [(11, "raise_scale")]
    over = [look(step, finding(until=90)) for step in (100, 110)]
    assert taken(chosen, [*over, *lasting(range(120, 150, 10))]) == [(121, "raise_scale")]


def test_the_chain_of_an_alarm_ends_with_stop() -> None:
    assert chain(finding(until=1)) == (*UNDERFLOW, "stop")
    assert chain(finding("nonfinite", until=1, actions=("skip", "rollback", "stop"))) == ("skip", "rollback", "stop")
    assert chain(finding("scale-low", until=1, actions=("raise_scale",))) == (*UNDERFLOW, "stop")
    assert chain(finding("dead", until=1, actions=())) == ("stop",)


@each("bad", [{"steps": 0}, {"total": -1}, {"tries": 1.5}, {"steps": True}])
def test_limits_are_whole_numbers(bad: dict[str, object]) -> None:
    name, value = next(iter(bad.items()))
    with pytest.raises(ArgumentError, match=f"Limits: expected {name} as a whole number of 1 or more; got {value}"):
        Limits(**bad)  # type: ignore[arg-type]


def test_an_order_comes_through_to_other_ranks() -> None:
    order = Order(
        action="to_bf16", rule="x", where=("a", "é"), since_step=3, before=2.0**-3, after="bf16", reason="r",
        targets=("a",), finding="f",
    )  # fmt: skip
    assert Order.decoded(order.encoded()) == order


def test_an_act_is_told_in_one_line_and_as_data() -> None:
    act = Act(
        step=9, action="raise_scale", rule="scale-low", since_step=4, before=1.0, after=2.0**15, reason="there is room",
        outcome="dry run",
    )  # fmt: skip
    assert str(act) == "would do raise_scale (1 to 2^15) for scale-low since step 4: there is room"
    assert act.to_dict() == {
        "step": 9, "action": "raise_scale", "rule": "scale-low", "where": [], "since_step": 4, "before": 1.0,
        "after": 32768.0, "reason": "there is room", "outcome": "dry run", "problem": None, "dry_run": True,
    }  # fmt: skip
