"""Sinks for a run in progress: TensorBoard, W&B, MLflow, a Python callable.

No tracker's package is imported before its sink is opened, on the sink's own thread.
"""

from plimsoll.runs.sinks.clients import MLflow as MLflow, WandB as WandB
from plimsoll.runs.sinks.resolve import as_sink as as_sink
from plimsoll.runs.sinks.tensorboard import TensorBoard as TensorBoard
