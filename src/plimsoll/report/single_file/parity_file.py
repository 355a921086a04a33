"""`write_parity`: a verdict on two recipes as HTML, Markdown, JSON or text file."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from plimsoll.diagnosis import Parity
from plimsoll.errors import ArgumentError
from plimsoll.report.drawing.plotly_parts import TEMPLATES
from plimsoll.report.page.assets import FILES, PLOTLY
from plimsoll.report.results import parity as figure_of
from plimsoll.report.single_file.html_report import packed, policy
from plimsoll.runs.storage.atomic_files import check_place, write_text
from plimsoll.text import escaped_cell, in_html, printable
from plimsoll.version import __version__

_STYLE = """
body { max-width: 62rem; margin: 0 auto; padding: var(--space); }
h1 { margin: 0 0 0.5rem; font-size: 1.4rem; line-height: 1.3; text-wrap: balance; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: 0.25rem 1.5rem 0.25rem 0; text-align: left; vertical-align: top; }
tr { border-bottom: 1px solid var(--line); }
th { font-weight: 500; color: var(--soft); white-space: nowrap; }
p { margin: 0.25rem 0; } footer { margin-top: 2rem; color: var(--soft); }
"""
# Plotly and the figure are packed, and unpacked when the page is opened, as in the report (js/embedded.js).
_SCRIPT = """"use strict";
const unpacked = async (id) => {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
};
(async () => {
  const script = document.createElement("script");
  script.textContent = await unpacked("plotly");
  document.head.append(script);
  const { data, layout, templates, label } = JSON.parse(await unpacked("figure"));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const place = document.getElementById("picture");
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", label);
  const draw = () => Plotly.react(place, data, { ...layout, template: templates[dark.matches ? "dark" : "light"] },
    { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "" });
  dark.addEventListener("change", draw);
  draw();
})();
"""


def write_parity(found: Parity, path: str | os.PathLike[str]) -> Path:
    """Write a verdict on two recipes as one file, in the form that its ending names.

    Args:
        found: The result of `plimsoll.parity`.
        path: The file: .html for a page with the figure that needs no network, .md, .json or .txt.

    Returns:
        The path of the file.

    Raises:
        ArgumentError: It is no verdict, the ending is another one, or the path is a folder or in one that is missing.
        RunError: The file cannot be written.
        MissingExtraError: plotly is not installed, which a page needs.
    """
    if not isinstance(found, Parity):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"write_parity: expected the result of plimsoll.parity; got {type(found).__name__}. Pass that."
        )
    place = check_parity_path(path)
    write_text("parity", place, _FORMS[place.suffix.lower()](found))
    return place


def check_parity_path(path: str | os.PathLike[str]) -> Path:
    """Return a file's path; raise `ArgumentError` for one that cannot be written."""
    return check_place("parity", path, _FORMS)


def _html(found: Parity) -> str:
    plotly = PLOTLY.read_text("utf-8")
    base = (FILES / "css" / "base.css").read_text("utf-8")
    facts = "".join(
        f'<tr><th scope="row">{in_html(name)}</th><td>{in_html(value)}</td></tr>\n' for name, value in found.facts()
    )
    notes = "".join(f"<p>{in_html(line)}</p>\n" for line in (found.remaining, *found.notes) if line)
    picture, scripts = "", ""
    if found.history:
        picture = '<div id="picture"></div>\n'
        scripts = (
            f'<script type="text/plain" id="figure">{packed(_answers(found))}</script>\n'
            f'<script type="text/plain" id="plotly">{packed(plotly)}</script>\n<script>{_SCRIPT}</script>\n'
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy((plotly, _SCRIPT))}">\n'
        f"<title>{in_html(found.verdict.capitalize())} - Plimsoll parity</title>\n"
        f"<style>{base}{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{in_html(found.sentence)}</h1>\n{notes}{picture}<table>\n{facts}</table>\n</main>\n"
        f"<footer>Made by Plimsoll {__version__}. This file makes no network requests.</footer>\n"
        f"{scripts}</body>\n</html>\n"
    )


def _answers(found: Parity) -> str:
    """Return the page's figure, without the title, which the page itself has."""
    figure = figure_of(found).update_layout(title=None, margin={"t": 36})
    plain = json.loads(figure.to_json() or "{}")
    return json.dumps(
        {"data": plain["data"], "layout": plain["layout"], "templates": dict(TEMPLATES), "label": found.sentence}
    )


def _markdown(found: Parity) -> str:
    rows = "\n".join(f"| {escaped_cell(name)} | {escaped_cell(value)} |" for name, value in found.facts())
    notes = "\n\n".join(escaped_cell(line) for line in (found.remaining, *found.notes) if line)
    return f"**{escaped_cell(found.sentence)}**\n\n| | |\n|---|---|\n{rows}\n\n{notes}".rstrip() + "\n"


def _json(found: Parity) -> str:
    return json.dumps(found.to_dict(), indent=2, allow_nan=False) + "\n"


def _plain(found: Parity) -> str:
    return printable(f"{found}\n\n" + "".join(f"{name}: {value}\n" for name, value in found.facts()))


_FORMS: Mapping[str, Callable[[Parity], str]] = {".html": _html, ".md": _markdown, ".json": _json, ".txt": _plain}
