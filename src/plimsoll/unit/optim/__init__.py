"""Optimizers whose learning rate carries over width and depth: torch's own, with the rules of u-muP."""

from plimsoll.unit.optim._optimizers import SGD as SGD, Adam as Adam, AdamW as AdamW
from plimsoll.unit.optim._rules import lr_factor as lr_factor
