"""Experiments `demo` and `clip`: hard batches in FP16, and what keeps it training."""

from plimsoll.lab.clip._demo import DEMO as DEMO
from plimsoll.lab.clip._experiment import CLIP as CLIP
