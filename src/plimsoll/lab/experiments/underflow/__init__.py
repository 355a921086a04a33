"""Experiment `underflow`: how many layers underflow, over time."""

from plimsoll.lab.experiments.underflow.experiment import UNDERFLOW as UNDERFLOW
