"""Experiment `formats`: what formats hold."""

from plimsoll.lab.formats._experiment import FORMATS as FORMATS
