"""Experiment `tf32`: the digits and the range of TF32."""

from plimsoll_lab.experiments.tf32.experiment import TF32 as TF32
