"""Experiment `layerwise`: a scale per layer against one scale."""

from plimsoll.lab.experiments.layerwise.experiment import LAYERWISE as LAYERWISE
