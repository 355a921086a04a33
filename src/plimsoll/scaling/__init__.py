"""Loss scalers, which keep small gradients from underflow and react to overflow."""

from plimsoll import exports
from plimsoll.scaling.base import SCALERS as SCALERS, LossScaler as LossScaler
from plimsoll.scaling.dynamic import DynamicScaler as DynamicScaler, Hysteresis as Hysteresis
from plimsoll.scaling.layerwise.scaler import LayerScaler as LayerScaler
from plimsoll.scaling.spectral.scale_windows import ScaleReport as ScaleReport, ScaleWindow as ScaleWindow
from plimsoll.scaling.spectral.scaler import SpectralScaler as SpectralScaler
from plimsoll.scaling.static import StaticScaler as StaticScaler
from plimsoll.scaling.step import StepOutcome as StepOutcome

exports.show_classes(__name__)
