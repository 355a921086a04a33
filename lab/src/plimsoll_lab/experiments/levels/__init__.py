"""Experiment `levels`: O0 to O3."""

from plimsoll_lab.experiments.levels.experiment import LEVELS as LEVELS
