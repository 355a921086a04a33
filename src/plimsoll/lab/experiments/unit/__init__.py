"""Experiment `unit`: a character model without a loss scale."""

from plimsoll.lab.experiments.unit.experiment import UNIT as UNIT
