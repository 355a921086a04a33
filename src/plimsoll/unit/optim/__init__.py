"""Torch's optimizers with learning rates that carry over width and depth, by the rules of u-muP."""

from plimsoll import exports
from plimsoll.unit.optim.optimizers import SGD as SGD, Adam as Adam, AdamW as AdamW
from plimsoll.unit.optim.parameter_kinds import lr_factor as lr_factor

exports.show_classes(__name__)
