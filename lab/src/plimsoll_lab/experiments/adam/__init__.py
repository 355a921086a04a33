"""Experiment `adam`: Adam in FP16."""

from plimsoll_lab.experiments.adam.experiment import ADAM as ADAM
