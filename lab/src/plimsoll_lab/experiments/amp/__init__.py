"""Experiment `amp`: three networks in five precisions."""

from plimsoll_lab.experiments.amp.experiment import AMP as AMP
