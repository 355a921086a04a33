"""Experiment `levels`: O0 to O3."""

from plimsoll.lab.experiments.levels.experiment import LEVELS as LEVELS
