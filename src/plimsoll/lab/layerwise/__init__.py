"""Experiment `layerwise`: a scale per layer against one scale."""

from plimsoll.lab.layerwise._experiment import LAYERWISE as LAYERWISE
