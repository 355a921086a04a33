"""Experiment `techniques`: each of three techniques left out."""

from plimsoll.lab.techniques._experiment import TECHNIQUES as TECHNIQUES
