"""Experiment `tf32`: the digits and the range of TF32."""

from plimsoll.lab.tf32._experiment import TF32 as TF32
