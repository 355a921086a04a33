"""Experiment `unit`: a character model without a loss scale."""

from plimsoll.lab.unit._experiment import UNIT as UNIT
