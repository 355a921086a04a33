"""Low precision on hardware that lacks it."""

from plimsoll.emulate._autocast import Autocast as Autocast
from plimsoll.emulate._lists import CUDA as CUDA, OperationLists as OperationLists
