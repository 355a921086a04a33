"""Experiment `unit-sweep`: many character models, five ways each."""

from plimsoll_lab.experiments.unit_sweep.experiment import UNIT_SWEEP as UNIT_SWEEP
