"""Injected faults, each named at its operation, phase, module and line; and what only looks like one."""

import pytest

from plimsoll.diagnosis import locate
from tests.support.cases import each
from tests.support.diagnosis.breakages import FAULTS
from tests.support.diagnosis.harmless import HEALTHY
from tests.support.versions import only_from


@each("name", FAULTS)
def test_fault_is_named(name: str):
    case = FAULTS[name]
    fault = locate(case.make())
    assert fault is not None
    assert (fault.operation, fault.phase, fault.kind) == (case.operation, case.phase, case.kind)
    assert fault.module == case.module
    if case.forward is not None:
        assert fault.forward == case.forward
    assert fault.source is not None
    assert fault.source.text.endswith("# the fault")
    assert case.says in fault.sentence
    assert max(len(line) for line in str(fault).splitlines()) <= 80


# torch 2.9's gradient of atan2 at the origin is NaN: a fault that is rightly found.
ATAN2 = pytest.param("atan2", marks=only_from("2.13", "a gradient of atan2 at the origin"))


@pytest.mark.parametrize("name", [ATAN2 if name == "atan2" else name for name in HEALTHY])
def test_what_reaches_nothing_is_no_fault(name: str):
    assert locate(HEALTHY[name]()) is None
