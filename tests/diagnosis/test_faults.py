"""Forty injected faults, each named by its rule at its layer within its steps; and what must be no alarm."""

import math
from collections.abc import Callable

from plimsoll.diagnosis import RULES, SEVERITIES, Rule
from plimsoll.diagnosis.rules.registry import rule_of
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS, INNOCENT, Fault
from tests.support.diagnosis.recorded import ONE_WORKER, Recorded
from tests.support.diagnosis.stories import Story

pytestmark = ONE_WORKER


@each("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault: Fault, recorded: Callable[[Story], Recorded]) -> None:
    findings = recorded(fault.story).found
    mine = [f for f in findings if f.rule == fault.rule]
    assert mine, [str(f) for f in findings]
    severe = [f for f in mine if SEVERITIES.index(f.severity) >= SEVERITIES.index(fault.severity)]
    assert severe, [str(f) for f in mine]
    finding = severe[0]
    assert fault.layer is None or finding.where[0].startswith(fault.layer), finding
    assert fault.first <= finding.since_step <= max(fault.last, fault.first), finding
    for f in findings:
        has_numbers = any(not math.isnan(spot.value) for spot in f.spots)
        assert not has_numbers or rule_of(f).location_item is not Rule.location_item, f"{f.rule}: no unit"


@each("name", INNOCENT)
def test_what_is_sound_is_no_alarm(name: str, recorded: Callable[[Story], Recorded]) -> None:
    alarms = [str(f) for f in recorded(INNOCENT[name]).found if f.severity == "alarm"]
    assert not alarms


def test_there_are_forty_faults_and_every_rule_has_one() -> None:
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    spoken = {fault.rule for fault in FAULTS} | {"structural-zeros", "records-lost"}  # tested in test_rules.py
    assert spoken == {rule.id for rule in RULES}
