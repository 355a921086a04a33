"""Training in low precision: levels and policies, master weights, the training step."""

from plimsoll.precision._kahan import KahanWeights as KahanWeights
from plimsoll.precision._masters import MasterWeights as MasterWeights
from plimsoll.precision._stochastic import StochasticWeights as StochasticWeights
