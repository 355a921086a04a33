"""Optimizers whose learning rate carries over width and depth: torch's own, with the rules of u-muP."""

from plimsoll import exports
from plimsoll.unit.optim.learning_rates import lr_factor as lr_factor
from plimsoll.unit.optim.optimizers import SGD as SGD, Adam as Adam, AdamW as AdamW

exports.show_classes(__name__)
