"""Experiment `unit-factors`: every operation's factor, by formula and measured."""

from plimsoll_lab.experiments.unit_factors.experiment import UNIT_FACTORS as UNIT_FACTORS
