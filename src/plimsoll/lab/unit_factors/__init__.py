"""Experiment `unit-factors`: every operation's factor, by formula and measured."""

from plimsoll.lab.unit_factors._experiment import UNIT_FACTORS as UNIT_FACTORS
