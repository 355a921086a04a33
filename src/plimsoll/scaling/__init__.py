"""Loss scalers: what multiplies the loss so that small gradients survive, and what it does when large ones do not."""

from plimsoll.scaling._dynamic import DynamicScaler as DynamicScaler
from plimsoll.scaling._hysteresis import Hysteresis as Hysteresis
from plimsoll.scaling._layers import LayerScaler as LayerScaler
from plimsoll.scaling._outcome import StepOutcome as StepOutcome
from plimsoll.scaling._scaler import LossScaler as LossScaler
from plimsoll.scaling._spectral import SpectralScaler as SpectralScaler
from plimsoll.scaling._spectral_windows import ScaleReport as ScaleReport, ScaleWindow as ScaleWindow
from plimsoll.scaling._static import StaticScaler as StaticScaler
