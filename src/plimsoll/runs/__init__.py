"""Runs on disk: written by `RunWriter` during training, read by `Run` at any time.

A run is a folder of Parquet parts and a manifest (docs/reference/run-format.md). `Batch`, `Scalars` and `Event` are the
records that go into it.
"""

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from plimsoll.runs.sinks import (
        MLflow as MLflow,
        TensorBoard as TensorBoard,
        WandB as WandB,
        as_sink as as_sink,
    )
    from plimsoll.runs.writing.writer import RunWriter as RunWriter

exports.show_classes(__name__)
# Reading needs no writer and no sink.
_OF_WRITING = {"RunWriter": "writing.writer", **dict.fromkeys(("MLflow", "TensorBoard", "WandB", "as_sink"), "sinks")}
__getattr__, __dir__ = exports.lazy(__name__, _OF_WRITING)
