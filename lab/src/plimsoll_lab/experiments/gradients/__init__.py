"""Experiment `gradients`: a detector's activation gradients."""

from plimsoll_lab.experiments.gradients.experiment import GRADIENTS as GRADIENTS
