"""What a training run leaves on disk: written by `RunWriter` while it trains, read by `Run` then or at any time later.

A run is a folder of Parquet parts and a manifest (docs/reference/run-format.md). `Batch`, `Scalars` and `Event` are
what goes into it.
"""

from plimsoll import exports
from plimsoll.runs.reading.module_casts import Cast as Cast
from plimsoll.runs.reading.run import Run as Run
from plimsoll.runs.records import (
    EXTRAS as EXTRAS,
    Batch as Batch,
    Event as Event,
    Record as Record,
    Scalars as Scalars,
    Sink as Sink,
    StepRecord as StepRecord,
)
from plimsoll.runs.sinks import (
    MLflow as MLflow,
    TensorBoard as TensorBoard,
    WandB as WandB,
    as_sink as as_sink,
)
from plimsoll.runs.writing.writer import RunWriter as RunWriter

exports.show_classes(__name__)
