"""Conformance certificates of any library's casts, packs, unpacks, products, sums."""

from plimsoll import exports
from plimsoll.certification.certificate import (
    Counterexample as Counterexample,
    Inferred as Inferred,
    Row as Row,
)
from plimsoll.certification.certifying import certify as certify
from plimsoll.certification.sheet import Certificate as Certificate

exports.show_classes(__name__)
