"""Answers from recorded numbers: a run's problems, and another format's effect.

`diagnose` applies the rules (`RULES`, each a `Rule`) to a `View` of a run and returns `Finding`s. `whatif` answers for
any format and shift, `plan` for each module, `check_plan` checks a plan against another run, `diff` finds where two
runs diverge, and `parity` judges whether one recipe trains as well as another. These judge recorded runs. `Guard` and
`locate` work on live training.

All but the rules is loaded when it is first used: live training needs parts of torch that a recorded run does not.
"""

from typing import TYPE_CHECKING

from plimsoll import exports
from plimsoll.diagnosis.finding import (
    SEVERITIES as SEVERITIES,
    Action as Action,
    Finding as Finding,
    Severity as Severity,
    Spot as Spot,
    grouped as grouped,
    shown as shown,
)
from plimsoll.diagnosis.rules import RULES as RULES
from plimsoll.diagnosis.rules.base import (
    EvidenceItem as EvidenceItem,
    FindingContext as FindingContext,
    Phrase as Phrase,
    Rule as Rule,
    threshold as threshold,
)
from plimsoll.diagnosis.run_rules import diagnose as diagnose, with_thresholds as with_thresholds
from plimsoll.diagnosis.view import View as View

if TYPE_CHECKING:
    from plimsoll.diagnosis.comparison.compare_runs import diff as diff
    from plimsoll.diagnosis.comparison.divergence import Divergence as Divergence, Parting as Parting
    from plimsoll.diagnosis.equivalence.judge import parity as parity
    from plimsoll.diagnosis.equivalence.result import Moment as Moment, Parity as Parity, Speed as Speed
    from plimsoll.diagnosis.estimates.usable_scales import Stretch as Stretch
    from plimsoll.diagnosis.guard.guard import Guard as Guard
    from plimsoll.diagnosis.guard.records import Act as Act, Limits as Limits, Look as Look
    from plimsoll.diagnosis.locating.fault import Fault as Fault, Operand as Operand, Source as Source
    from plimsoll.diagnosis.locating.locate_fault import locate as locate
    from plimsoll.diagnosis.locating.on_trigger import OnTrigger as OnTrigger, locate_on_trigger as locate_on_trigger
    from plimsoll.diagnosis.planning.check import PlanCheck as PlanCheck, PlanRow as PlanRow, check_plan as check_plan
    from plimsoll.diagnosis.planning.make_plan import plan as plan
    from plimsoll.diagnosis.what_if.answer import whatif as whatif
    from plimsoll.diagnosis.what_if.result import Row as Row, WhatIf as WhatIf

# The home of each name that is loaded when it is first used.
_LATER = {
    **dict.fromkeys(("Divergence", "Parting"), "comparison.divergence"),
    "diff": "comparison.compare_runs",
    "parity": "equivalence.judge",
    **dict.fromkeys(("Moment", "Parity"), "equivalence.result"),
    "Speed": "equivalence.result",
    "Guard": "guard.guard",
    **dict.fromkeys(("Act", "Limits", "Look"), "guard.records"),
    **dict.fromkeys(("Fault", "Operand", "Source"), "locating.fault"),
    "locate": "locating.locate_fault",
    **dict.fromkeys(("OnTrigger", "locate_on_trigger"), "locating.on_trigger"),
    **dict.fromkeys(("PlanCheck", "PlanRow", "check_plan"), "planning.check"),
    "plan": "planning.make_plan",
    "whatif": "what_if.answer",
    **dict.fromkeys(("Row", "WhatIf"), "what_if.result"),
    "Stretch": "estimates.usable_scales",
}

exports.show_classes(__name__)
__getattr__, __dir__ = exports.lazy(__name__, _LATER)
