"""Experiment `formats`: what formats hold."""

from plimsoll_lab.experiments.formats.experiment import FORMATS as FORMATS
