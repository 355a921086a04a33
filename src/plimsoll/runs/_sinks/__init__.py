"""Where a run goes besides its folder: TensorBoard, W&B, MLflow, a Python callable; and what keeps them at a distance.

No tracker's package is imported before its sink is opened, on the sink's own thread.
"""

from plimsoll.runs._sinks._as_sink import as_sink as as_sink
from plimsoll.runs._sinks._mlflow import MLflow as MLflow
from plimsoll.runs._sinks._runner import SinkRunner as SinkRunner
from plimsoll.runs._sinks._tensorboard import TensorBoard as TensorBoard
from plimsoll.runs._sinks._wandb import WandB as WandB
