"""Sinks for a run in progress: TensorBoard, W&B, MLflow, a Python callable.

No tracker's package is imported before its sink is opened, on the sink's own thread.
"""

from plimsoll.runs.sinks.mlflow import MLflow as MLflow
from plimsoll.runs.sinks.resolve import as_sink as as_sink
from plimsoll.runs.sinks.runner import SinkRunner as SinkRunner
from plimsoll.runs.sinks.tensorboard import TensorBoard as TensorBoard
from plimsoll.runs.sinks.wandb import WandB as WandB
