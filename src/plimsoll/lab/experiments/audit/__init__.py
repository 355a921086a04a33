"""Experiment `audit`: every operation's scale, before conversion, after it, and after training."""

from plimsoll.lab.experiments.audit.experiment import AUDIT as AUDIT
