"""The rules: which factors an operation has by itself. Formulas are those of `_formulas` and `_nonlinear` alone."""

from plimsoll.unit._changes import Port
from plimsoll.unit._graph import base_name
from plimsoll.unit._ideal import VIEWS, Ideal, Rule, Site
from plimsoll.unit._rules_losses import LOSSES
from plimsoll.unit._rules_pointwise import POINTWISE
from plimsoll.unit._rules_products import PRODUCTS
from plimsoll.unit._rules_sums import SUMS


def _neutral(site: Site) -> Ideal:
    return Ideal(operation=base_name(site.node), why="changes no value", rigid=True)


RULES: dict[str, Rule] = {**dict.fromkeys(VIEWS, _neutral), **PRODUCTS, **POINTWISE, **SUMS, **LOSSES}


def ideal_of(site: Site) -> Ideal:
    """What the rules say of an operation; one that they do not know is left as it is, and says so."""
    name = base_name(site.node)
    rule = RULES.get(name)
    if rule is None:
        return Ideal(operation=name, why="unknown", rigid=True, left="no rule for this operation")
    return rule(site)


def forward_weight(ideal: Ideal, port: Port) -> float:
    """What multiplies an input forward."""
    return ideal.weights.get(port, 1.0)
