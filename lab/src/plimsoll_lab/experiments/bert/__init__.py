"""Experiment `bert`: masked tokens, then answers, in seven precisions."""

from plimsoll_lab.experiments.bert.experiment import BERT as BERT
