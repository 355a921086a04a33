"""Draws the pictures of "The rules": a run with each rule's fault, diagnosed, and the figure of what was found.

python docs/images/rules.py [RULE ...]      needs Chromium (Debian: apt-get install chromium)
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

import plotly
from PIL import Image
from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from plimsoll.diagnosis import RULES, View, diagnose  # noqa: E402
from plimsoll.report import figure_for  # noqa: E402
from plimsoll.runs import Event, Run, RunWriter  # noqa: E402
from tests.support.diagnosis.faults import FAULTS, INNOCENT  # noqa: E402
from tests.support.diagnosis.stories import SOUND, Story  # noqa: E402

FOLDER = Path(__file__).with_name("rules")
WIDTH, TALLEST = 900, 560  # pixels
COLOURS = 256  # of a picture's palette
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync")  # fmt: skip

# Runs that show a rule better than the first of its faults in tests/support/diagnosis/faults.py, by their names there.
SHOWN = {
    "underflow-high": "one layer shrinks at 100",
    "no-single-scale": "layers part at 100",
    "scale-low": "scale frozen low after hard batches",
    "scale-oscillation": "scale swings since 80",
    "nonfinite": "overflow on and on",
    "norm-of-few-values": "a batch norm of two values",
    "updates-swallowed": "updates swallowed since 100",
    "second-moment-lost": "second moments of one layer lost",
    "structural-zeros": "unused embedding rows",
}


def run_of(rule: str, folder: Path) -> Path:
    """A run in which the rule finds something."""
    if rule == "records-lost":
        return damaged(folder)
    stories: dict[str, Story] = {fault.name: fault.story for fault in FAULTS} | INNOCENT
    name = SHOWN.get(rule) or next(fault.name for fault in FAULTS if fault.rule == rule)
    return stories[name].write(folder)


def damaged(folder: Path) -> Path:
    """A sound run with a part that is torn, and a tensor that could not be measured."""
    SOUND.write(folder)
    with RunWriter(folder) as writer:
        for step in (40, 90, 95, 140):
            writer.write(Event(step=step, kind="not measured", message="weights head.weight: on no device"))
    torn = min((folder / "scalars").iterdir())
    torn.write_bytes(torn.read_bytes()[:100])
    return folder


def picture(page: Page, rule: str, folder: Path) -> bytes:
    """The figure of the rule's first finding, as a PNG with a palette."""
    view = View(Run(run_of(rule, folder)))
    finding = next(found for found in diagnose(view) if found.rule == rule)
    figure = figure_for(view, finding)
    figure.update_layout(width=WIDTH, height=min(figure.layout.height, TALLEST))
    page.evaluate("json => Plotly.newPlot('figure', JSON.parse(json))", figure.to_json())
    image = Image.open(io.BytesIO(page.locator("#figure .main-svg").first.screenshot()))
    found = io.BytesIO()
    image.convert("RGB").quantize(COLOURS).save(found, "png", optimize=True)
    return found.getvalue()


def main(rules: list[str]) -> None:
    """Writes the pictures of some rules, or of all."""
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(ARGUMENTS))
        page = browser.new_page(viewport={"width": WIDTH, "height": TALLEST + 50})
        page.set_content("<body style='margin:0'><div id='figure'></div>")
        page.add_script_tag(path=Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
        for rule in rules or [rule.id for rule in RULES]:
            with tempfile.TemporaryDirectory() as folder:
                (FOLDER / f"{rule}.png").write_bytes(picture(page, rule, Path(folder) / "run"))
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
