"""Experiment `unit`: a character model without a loss scale."""

from plimsoll_lab.experiments.unit.experiment import UNIT as UNIT
