"""TensorBoard's protocol buffers, filled in: steps, texts, and what an event file begins with.

`tensorboard.compat.proto` is TensorBoard's own copy of the messages; TensorFlow is not asked for.
"""

import json
import time
from typing import Any

import numpy as np

from plimsoll.runs.records import Event
from plimsoll.runs.sinks.extras import load
from plimsoll.runs.sinks.selection import Histogram, StepValues


def opening(step: int) -> list[bytes]:
    """What a file begins with; a session that starts at `step` makes readers forget later steps of files before it."""
    events = load("tensorboard.compat.proto.event_pb2")
    start = events.SessionLog(status=events.SessionLog.START)
    return [
        _bytes(events.Event(wall_time=time.time(), file_version="brain.Event:2")),
        _bytes(events.Event(wall_time=time.time(), step=step, session_log=start)),
    ]


def values(step: int, found: StepValues) -> bytes:
    """A step's scalars and histograms."""
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    summary = [value(tag=tag, simple_value=number) for tag, number in found.scalars.items()]
    summary += [value(tag=tag, histo=_histogram(histogram)) for tag, histogram in found.histograms.items()]
    return _event(step, time.time(), summary)


def text(event: Event) -> bytes:
    """An event of the run, as a text under "events/kind"."""
    tensors = load("tensorboard.compat.proto.tensor_pb2")
    dtype = load("tensorboard.compat.proto.types_pb2").DT_STRING
    metadata = load("tensorboard.plugins.text.metadata").create_summary_metadata(display_name="", description="")
    details = json.dumps(dict(event.details), default=str)
    words = f"{event.message} (rank {event.rank})" + (f"\n\n`{details}`" if event.details else "")
    tensor = tensors.TensorProto(dtype=dtype, string_val=[words.encode(errors="replace")])
    value = load("tensorboard.compat.proto.summary_pb2").Summary.Value
    return _event(event.step, event.time, [value(tag=f"events/{event.kind}", metadata=metadata, tensor=tensor)])


def _histogram(histogram: Histogram) -> Any:
    """Limits are right edges; the empty bucket in front says where the first one begins.

    Newer readers take that edge, and the last one, from `min` and `max`, which therefore are edges too. The sums are as
    if values lay in the middle of their binades.
    """
    edges = histogram.edges.astype(np.float64)
    counts = histogram.counts.astype(np.float64)
    middles = edges[:-1] + 0.5
    return load("tensorboard.compat.proto.summary_pb2").HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=counts.sum(),
        sum=counts @ middles,
        sum_squares=counts @ middles**2,
        bucket_limit=edges.tolist(),
        bucket=[0.0, *counts.tolist()],
    )


def _event(step: int, wall_time: float, summary: list[Any]) -> bytes:
    events = load("tensorboard.compat.proto.event_pb2")
    summaries = load("tensorboard.compat.proto.summary_pb2")
    return _bytes(events.Event(wall_time=wall_time, step=step, summary=summaries.Summary(value=summary)))


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString())
