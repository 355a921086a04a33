"""Experiment `t5`: a residual stream past 65,504."""

from plimsoll.lab.t5._experiment import T5 as T5
