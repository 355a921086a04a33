"""Draws the pictures of the tutorial "Hard batches in FP16" from the runs that `make demo` leaves.

python docs/images/clip.py [demo]      needs Chromium (Debian: apt-get install chromium)
"""

import html
import io
import sys
from pathlib import Path
from typing import Any

import plotly
from PIL import Image, ImageChops
from playwright.sync_api import sync_playwright

from plimsoll.diagnosis import View
from plimsoll.report import heatmap, loss_and_scale, spectrogram, summary
from plimsoll.runs import Run

WIDTH, TALLEST, COLOURS = 900, 560, 256
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip

SHOWN = "image.blocks.1.qkv.weight"  # a gradient that falls below FP16's smallest value

runs = Path(sys.argv[1] if len(sys.argv) > 1 else "demo") / "runs"
stock, layer = (View(Run(runs / name)) for name in ("fp16", "fp16-layer"))
FIGURES: dict[str, Any] = {
    "clip-scale": loss_and_scale(stock),
    "clip-stock": heatmap(stock, "underflow", "activation_gradients"),
    "clip-layer": heatmap(layer, "underflow", "activation_gradients"),
    "verdict": spectrogram(stock, "gradients", SHOWN),
}
verdict = html.escape(summary(stock).verdict)
HEADS = {
    "verdict": f"<p style='margin:0;padding:14px 18px;border-left:8px solid #b3261e;"
    f"font:18px/1.45 sans-serif;color:#111'>{verdict}</p>"
}

with sync_playwright() as browsers:
    browser = browsers.chromium.launch(executable_path="/usr/bin/chromium", args=list(ARGUMENTS))
    page = browser.new_page(viewport={"width": WIDTH, "height": TALLEST})
    page.set_content(
        "<body style='margin:0;background:#fff'><div id='all'><div id='head'></div><div id='figure'></div></div></body>"
    )
    page.add_script_tag(content=plotly.offline.get_plotlyjs())
    for name, figure in FIGURES.items():
        figure.update_layout(width=WIDTH, height=min(figure.layout.height or TALLEST, TALLEST))
        page.evaluate("head => { document.getElementById('head').innerHTML = head }", HEADS.get(name, ""))
        page.evaluate("json => Plotly.newPlot('figure', JSON.parse(json))", figure.to_json())
        shot = Image.open(io.BytesIO(page.locator("#all").screenshot()))
        bottom = ImageChops.invert(shot.convert("L")).getbbox()[3]
        shot = shot.crop((0, 0, shot.width, min(bottom + 16, shot.height)))
        shot.convert("RGB").quantize(COLOURS).save(Path(__file__).with_name(f"{name}.png"), optimize=True)
    browser.close()
