"""What of a report's page is its own and not from a run: scripts, style, colours, and the policy that allows these.

It is trusted, and so not escaped: nothing from a run may go through `marked` but JSON that `in_page` made safe.
"""

import base64
import hashlib
import importlib.resources
import re
from collections.abc import Iterable
from typing import Any

from plimsoll.report.drawing.theme import FONT, TEMPLATES, Theme
from plimsoll.report.single_file.embedded_figures import in_page

# Of each theme, beside the figures' own colours: what states, links and controls are written in.
_INKS: dict[Theme, dict[str, str]] = {
    "light": {"alarm": "#b3261e", "warning": "#8a5200", "healthy": "#12704f", "accent": "#1f66a8"},
    "dark": {"alarm": "#ff8a7a", "warning": "#f0b35a", "healthy": "#5fd0a5", "accent": "#7cbdf5"},
}


def assets() -> dict[str, Any]:
    """Scripts, style and the policy that allows them and nothing else."""
    from plotly.offline import get_plotlyjs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    folder = importlib.resources.files("plimsoll.report.single_file") / "templates"
    first, script, style = ((folder / name).read_text("utf-8") for name in ("first.js", "report.js", "report.css"))
    plotly = str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")  # as a parser of HTML reads lines
    scripts = {"first": first, "plotly": plotly, "script": script}
    return {
        **{name: marked(text) for name, text in scripts.items()},
        "style": marked(style),
        "colours": marked(_colours()),
        "templates": marked(in_page({name: dict(each) for name, each in TEMPLATES.items()})),
        "policy": _policy(scripts.values()),
    }


def _policy(scripts: Iterable[str]) -> str:
    """Nothing from anywhere; scripts by hash; styles inline, since Plotly writes its own; pictures made in the page."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _colours() -> str:
    """The figures' papers and inks as the page's."""

    def variables(theme: Theme) -> str:
        layout = TEMPLATES[theme]["layout"]
        found = {
            "paper": layout["paper_bgcolor"], "ink": layout["font"]["color"],
            "soft": layout["title"]["subtitle"]["font"]["color"], "grid": layout["xaxis"]["gridcolor"], **_INKS[theme],
        }  # fmt: skip
        return "".join(f"--{name}:{value};" for name, value in found.items())

    light, dark = variables("light"), variables("dark")
    return (
        f":root{{--font:{FONT};{light}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
        f"@media screen{{:root[data-theme=light]{{{light}}}:root[data-theme=dark]{{{dark}}}}}\n"
    )


def powers(text: str) -> Any:
    """Text, escaped, with powers of two written as such."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"\b2\^(-?\d+)", _raised, str(escape(text))))


def _raised(power: "re.Match[str]") -> str:
    exponent = power[1].replace("-", "\N{MINUS SIGN}")
    return f"2<sup>{exponent}</sup>"


def marked(text: str) -> Any:
    """Text that is escaped no more: of this package's own, or JSON that `in_page` made safe."""
    from markupsafe import Markup

    return Markup(text)
