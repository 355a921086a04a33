"""Experiment `t5`: a residual stream past 65,504."""

from plimsoll_lab.experiments.t5.experiment import T5 as T5
