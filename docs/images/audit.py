"""Draws the picture of the how-to "See the scale of every operation": the audits of `plimsoll lab audit`.

python docs/images/audit.py      needs Chromium (Debian: apt-get install chromium)
"""

import io
from pathlib import Path
from typing import Any

import plotly
import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from plimsoll.unit import audit, convert
from plimsoll_lab.experiments.audit import Setup, Trained
from plimsoll_lab.source_text import make_batch, standard_library

WIDTH, COLOURS = 900, 64
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip

torch.manual_seed(0)
setup = Setup()
model = Trained(width=setup.width, layers=setup.layers, heads=setup.heads, length=setup.length)
drawn = make_batch(standard_library(), 0, 0, pieces=setup.pieces, length=setup.length)
batch = (drawn.inputs, drawn.targets)
figure: Any = audit(model, batch).compare(audit(convert(model, batch, seed=0), batch)).figure()
figure.update_layout(width=WIDTH)

with sync_playwright() as browsers:
    browser = browsers.chromium.launch(executable_path="/usr/bin/chromium", args=list(ARGUMENTS))
    page = browser.new_page(viewport={"width": WIDTH, "height": int(figure.layout.height)})
    page.set_content("<body style='margin:0;background:#fff'><div id='figure'></div></body>")
    page.add_script_tag(content=plotly.offline.get_plotlyjs())
    page.evaluate("json => Plotly.newPlot('figure', JSON.parse(json))", figure.to_json())
    shot = Image.open(io.BytesIO(page.locator("#figure").screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(Path(__file__).with_name("audit.png"), optimize=True)
    browser.close()
