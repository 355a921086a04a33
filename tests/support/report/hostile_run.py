"""A run whose every name tries to be something else: markup, scripts, paths, templates, endless text."""

import json
from pathlib import Path

import numpy as np
import torch

from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, Event, RunWriter, Scalars
from plimsoll.runs.storage import manifest as _manifest

NAMES = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    '"><svg onload=alert(3)>',
    "'; alert(4); //",
    "a" * 10_000,
    "line\u2028and\u2029paragraph",
    "../../../etc/passwd",
    "{{ 7 * 7 }}{% raw %}",
    "${alert(5)}%{x}",
    "\u202egnp.exe",
    "\x1b[31mred\x00\n\r\t",
    "&lt;script&gt;alert(6)&lt;/script&gt;",
    "__proto__",
    "<!--<script>alert(7)",
    "]]><![CDATA[",
    "`code` | pipe \\| @everyone https://evil.example/ [a](b)",
    "</style><style>body{display:none}",
    "<b>2<sup>10</sup></b>",
    "http://evil.example/x.png",
)
VALUES = 256


def write(path: Path, steps: int = 40) -> Path:
    """The run: gradients that vanish, so that findings name the names, and everything else by such names too."""
    settings = {name: {"deep": [name]} for name in NAMES}
    with RunWriter(path, settings=settings, flush_seconds=600) as writer:
        for step in range(steps):
            values = {"loss": 2.0 - 0.01 * step, "scale": 1024.0 * 2.0 ** -max(step - 20, 0), "nonfinite": 0.0}
            writer.write(Scalars(step=step, values={**values, **dict.fromkeys(NAMES, 1.0)}))
            _sample(writer, step, values["scale"])
            if step < len(NAMES):
                writer.write(
                    Event(step=step, kind=NAMES[step], message=NAMES[step], details={NAMES[step]: NAMES[step]})
                )
    return with_surrogates(path)


def with_surrogates(path: Path) -> Path:
    """Half a character, which JSON can hold and no text file can, in settings and versions."""
    manifest = path / "run.json"
    content = json.loads(manifest.read_text("utf-8"))
    content["settings"]["half \udc80"] = "and \ud800"
    content["versions"]["<b>\udc80"] = "</dd>\udfff"
    _manifest.write(manifest, content)
    return path


def _sample(writer: RunWriter, step: int, scale: float) -> None:
    random = torch.Generator().manual_seed(step)
    tensors, series = [], []
    for name in NAMES:
        for collection, fmt in (("gradients", "fp16"), ("activations", "fp16"), ("weights", "fp32")):
            size = 2.0**-18 if collection == "gradients" else 1.0
            x = torch.randn(VALUES, generator=random) * size
            held = (x * scale).half().float() / scale if collection == "gradients" else x
            series.append(writer.series(collection, name, format=fmt))
            tensors.append(held)
    bank = new_bank(len(tensors))
    measure_into(tensors, bank, list(range(len(tensors))), accumulate=False)
    index, scales = np.arange(len(tensors)), np.ones(len(tensors))
    rows = bank.numpy()[: len(tensors)]
    writer.write(Batch(step=step, rows=rows, index=index, series=np.array(series), scales=scales))
