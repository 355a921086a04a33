"""Experiment `formats`: what formats hold."""

from plimsoll.lab.experiments.formats.experiment import FORMATS as FORMATS
