"""Training in low precision: levels, policies, master weights, training step."""

from plimsoll import exports
from plimsoll.precision.levels.catalogue import LEVELS as LEVELS, Level as Level, levels_table as levels_table
from plimsoll.precision.levels.policy import Policy as Policy, PolicyRecord as PolicyRecord
from plimsoll.precision.preparation import prepare as prepare
from plimsoll.precision.training.gradient_compression import compress_gradients as compress_gradients
from plimsoll.precision.training.loop import Loop as Loop
from plimsoll.precision.weights.bfloat16 import KahanWeights as KahanWeights, StochasticWeights as StochasticWeights
from plimsoll.precision.weights.master_weights import (
    MasterWeights as MasterWeights,
    masters_to_model_parameters as masters_to_model_parameters,
    model_and_master_parameters as model_and_master_parameters,
    model_gradients_to_masters as model_gradients_to_masters,
)
from plimsoll.precision.workarounds import clamp_residuals as clamp_residuals, guard_adam as guard_adam

exports.show_classes(__name__)
