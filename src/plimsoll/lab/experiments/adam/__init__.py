"""Experiment `adam`: Adam in FP16."""

from plimsoll.lab.experiments.adam.experiment import ADAM as ADAM
