"""Experiment `gradients`: a detector's activation gradients."""

from plimsoll.lab.experiments.gradients.experiment import GRADIENTS as GRADIENTS
