"""Training in low precision: levels and policies, master weights, the training step."""

from plimsoll.precision._by_hand import (
    masters_to_model_parameters as masters_to_model_parameters,
    model_and_master_parameters as model_and_master_parameters,
    model_gradients_to_masters as model_gradients_to_masters,
)
from plimsoll.precision._communication import compress_gradients as compress_gradients
from plimsoll.precision._kahan import KahanWeights as KahanWeights
from plimsoll.precision._levels import LEVELS as LEVELS, Level as Level, levels_table as levels_table
from plimsoll.precision._loop import Loop as Loop
from plimsoll.precision._masters import MasterWeights as MasterWeights
from plimsoll.precision._policy import Policy as Policy, PolicyRecord as PolicyRecord
from plimsoll.precision._prepare import prepare as prepare
from plimsoll.precision._remedies_adam import guard_adam as guard_adam
from plimsoll.precision._remedies_clamp import clamp_residuals as clamp_residuals
from plimsoll.precision._stochastic import StochasticWeights as StochasticWeights
