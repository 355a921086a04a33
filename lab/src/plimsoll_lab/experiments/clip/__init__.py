"""Experiments `demo` and `clip`: hard batches in FP16, and what keeps it training."""

from plimsoll_lab.experiments.clip.demo import DEMO as DEMO
from plimsoll_lab.experiments.clip.experiment import CLIP as CLIP
