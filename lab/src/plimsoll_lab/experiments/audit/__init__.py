"""Experiment `audit`: every operation's scale, before conversion, after it, and after training."""

from plimsoll_lab.experiments.audit.experiment import AUDIT as AUDIT
