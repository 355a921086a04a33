"""Experiment `underflow`: how many layers underflow, over time."""

from plimsoll.lab.underflow._experiment import UNDERFLOW as UNDERFLOW
