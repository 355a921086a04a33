"""Torch's optimizers with learning rates by u-muP's rules for width and depth."""

from plimsoll import exports
from plimsoll.unit.optim.optimizers import SGD as SGD, Adam as Adam, AdamW as AdamW
from plimsoll.unit.optim.parameter_kinds import lr_factor as lr_factor

exports.show_classes(__name__)
