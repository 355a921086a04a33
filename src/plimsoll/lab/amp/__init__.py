"""Experiment `amp`: three networks in five precisions."""

from plimsoll.lab.amp._experiment import AMP as AMP
