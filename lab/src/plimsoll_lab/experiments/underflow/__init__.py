"""Experiment `underflow`: how many layers underflow, over time."""

from plimsoll_lab.experiments.underflow.experiment import UNDERFLOW as UNDERFLOW
