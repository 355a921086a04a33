"""Experiment `layerwise`: a scale per layer against one scale."""

from plimsoll_lab.experiments.layerwise.experiment import LAYERWISE as LAYERWISE
