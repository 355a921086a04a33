"""Experiment `techniques`: each of three techniques left out."""

from plimsoll_lab.experiments.techniques.experiment import TECHNIQUES as TECHNIQUES
