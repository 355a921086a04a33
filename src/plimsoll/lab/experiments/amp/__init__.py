"""Experiment `amp`: three networks in five precisions."""

from plimsoll.lab.experiments.amp.experiment import AMP as AMP
