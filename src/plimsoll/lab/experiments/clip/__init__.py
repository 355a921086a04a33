"""Experiments `demo` and `clip`: hard batches in FP16, and what keeps it training."""

from plimsoll.lab.experiments.clip.demo import DEMO as DEMO
from plimsoll.lab.experiments.clip.experiment import CLIP as CLIP
