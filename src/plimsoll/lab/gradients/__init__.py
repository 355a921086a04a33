"""Experiment `gradients`: a detector's activation gradients."""

from plimsoll.lab.gradients._experiment import GRADIENTS as GRADIENTS
