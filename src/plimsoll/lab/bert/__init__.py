"""Experiment `bert`: masked tokens, then answers, in seven precisions."""

from plimsoll.lab.bert._experiment import BERT as BERT
