"""From numbers to answers: what is wrong in a run, where, since when, and what another format would make of it.

`diagnose` applies the rules (`RULES`, each a `Rule`) to a `View` of a run and returns `Finding`s. `whatif` answers for
any format and shift, `plan` for each module, which `check_plan` holds against other runs; `diff` says where two runs
part. These judge recorded runs. `Guard` and `locate` work on live training: they are loaded when they are first used,
with the parts of torch that a recorded run does not need.
"""

import importlib
from typing import TYPE_CHECKING

from plimsoll.diagnosis._diagnose import (
    RULES as RULES,
    diagnose as diagnose,
    with_thresholds as with_thresholds,
)
from plimsoll.diagnosis._diff import diff as diff
from plimsoll.diagnosis._divergence import Divergence as Divergence, Parting as Parting
from plimsoll.diagnosis._fault import Fault as Fault, Operand as Operand, Source as Source
from plimsoll.diagnosis._finding import (
    SEVERITIES as SEVERITIES,
    Action as Action,
    Finding as Finding,
    Severity as Severity,
    Spot as Spot,
    grouped as grouped,
    shown as shown,
)
from plimsoll.diagnosis._plan import plan as plan
from plimsoll.diagnosis._plan_check import PlanCheck as PlanCheck, PlanRow as PlanRow, check_plan as check_plan
from plimsoll.diagnosis._rule import Rule as Rule, threshold as threshold
from plimsoll.diagnosis._view import View as View
from plimsoll.diagnosis._whatif import whatif as whatif
from plimsoll.diagnosis._whatif_result import Row as Row, WhatIf as WhatIf
from plimsoll.diagnosis._windows import Stretch as Stretch

if TYPE_CHECKING:
    from plimsoll.diagnosis._guard import Guard as Guard
    from plimsoll.diagnosis._guard_records import Act as Act, Limits as Limits, Look as Look
    from plimsoll.diagnosis._locate import locate as locate
    from plimsoll.diagnosis._locate_trigger import OnTrigger as OnTrigger, locate_on_trigger as locate_on_trigger

# Where each name for live training lives.
_LIVE = {
    "Act": "_guard_records",
    "Guard": "_guard",
    "Limits": "_guard_records",
    "Look": "_guard_records",
    "OnTrigger": "_locate_trigger",
    "locate": "_locate",
    "locate_on_trigger": "_locate_trigger",
}


def __getattr__(name: str) -> object:
    if name in _LIVE:
        value = getattr(importlib.import_module(f"plimsoll.diagnosis.{_LIVE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll.diagnosis' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIVE})
