"""The rules by operation. Formulas are those of `factors.formulas` and `factors.nonlinear`; the rest is measured."""

from plimsoll.unit.rules.losses import LOSSES
from plimsoll.unit.rules.measured import MEASURED, left
from plimsoll.unit.rules.operation import Ideal, Rule, Site
from plimsoll.unit.rules.pointwise import POINTWISE
from plimsoll.unit.rules.products import PRODUCTS
from plimsoll.unit.rules.sums import SUMS

RULES: dict[str, Rule] = {**MEASURED, **PRODUCTS, **POINTWISE, **SUMS, **LOSSES}


def ideal_of(site: Site) -> Ideal:
    """What the rules say of an operation; one that they do not know is left as it is, and says so."""
    rule = RULES.get(site.operation)
    return left(site, "no rule for this operation") if rule is None else rule(site)
