"""Experiment `unit-sweep`: many character models, five ways each."""

from plimsoll.lab.unit_sweep._experiment import UNIT_SWEEP as UNIT_SWEEP
