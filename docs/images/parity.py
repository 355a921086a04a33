"""Draws the picture of the tutorial "Is the cheap recipe as good?": five runs of each recipe of its first block.

python docs/images/parity.py      needs Chromium (Debian: apt-get install chromium)
"""

import io
import os
import re
import tempfile
from pathlib import Path

import plotly
import torch
from PIL import Image
from playwright.sync_api import sync_playwright

import plimsoll as pl

WIDTH, COLOURS = 900, 64
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip

tutorial = (Path(__file__).parents[1] / "tutorial" / "parity.md").read_text("utf-8")
picture = Path(__file__).resolve().with_name("parity.png")
os.chdir(tempfile.mkdtemp())
names: dict[str, object] = {}
exec(re.findall(r"^```python\n(.*?)^```", tutorial, re.MULTILINE | re.DOTALL)[0], names)  # noqa: S102
train = names["train"]
assert callable(train)
for seed in range(1, 5):
    train(f"runs/fp32-{seed}", seed)
    train(f"runs/bf16-{seed}", seed, weights=torch.bfloat16)
sides = [[f"runs/{recipe}-{seed}" for seed in range(5)] for recipe in ("fp32", "bf16")]
found = pl.parity(*sides, tolerance="2 %")
figure = pl.report.parity(found)
figure.update_layout(width=WIDTH)

with sync_playwright() as browsers:
    browser = browsers.chromium.launch(executable_path="/usr/bin/chromium", args=list(ARGUMENTS))
    page = browser.new_page(viewport={"width": WIDTH, "height": int(figure.layout.height)})
    page.set_content("<body style='margin:0;background:#fff'><div id='figure'></div></body>")
    page.add_script_tag(content=plotly.offline.get_plotlyjs())
    page.evaluate("json => Plotly.newPlot('figure', JSON.parse(json))", figure.to_json())
    shot = Image.open(io.BytesIO(page.locator("#figure").screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(picture, optimize=True)
    browser.close()
