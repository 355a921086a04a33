"""The rules by operation. Formulas are those of `_formulas` and `_nonlinear`; what has none is measured."""

from plimsoll.unit._ideal import Ideal, Rule, Site
from plimsoll.unit._rules_losses import LOSSES
from plimsoll.unit._rules_measured import MEASURED, left
from plimsoll.unit._rules_pointwise import POINTWISE
from plimsoll.unit._rules_products import PRODUCTS
from plimsoll.unit._rules_sums import SUMS

RULES: dict[str, Rule] = {**MEASURED, **PRODUCTS, **POINTWISE, **SUMS, **LOSSES}


def ideal_of(site: Site) -> Ideal:
    """What the rules say of an operation; one that they do not know is left as it is, and says so."""
    rule = RULES.get(site.operation)
    return left(site, "no rule for this operation") if rule is None else rule(site)
