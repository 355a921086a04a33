"""Experiment `levels`: O0 to O3."""

from plimsoll.lab.levels._experiment import LEVELS as LEVELS
