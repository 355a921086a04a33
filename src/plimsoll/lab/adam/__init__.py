"""Experiment `adam`: Adam in FP16."""

from plimsoll.lab.adam._experiment import ADAM as ADAM
