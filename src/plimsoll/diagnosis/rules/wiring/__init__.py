"""Rules of training loops, optimizers and layers that are set up wrongly.

These rules read the facts of `plimsoll.watch.steps.wiring`, events of kind "wiring". Where a recorded number can
confirm or refute a fact, it decides.
"""
