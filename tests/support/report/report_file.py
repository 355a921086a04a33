"""A report's file as a test reads it: its elements, its text for readers without scripts, and the packed answers."""

import base64
import gzip
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class ReportFile(HTMLParser):
    """Elements with their attributes, scripts, headings and text of a report; `answers` is what its page asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.open = "", [""]
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.headings: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "use", "input", "circle", "br"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.open[-1] != "style":
            self.text += data
        if self.headings and any(tag in ("h1", "h2", "h3") for tag in self.open):
            self.headings[-1] += data

    def unpacked(self, name: str) -> str:
        """The text of a packed element."""
        text = next(text for attributes, text in self.scripts if attributes.get("id") == name)
        return gzip.decompress(base64.b64decode(text)).decode()

    @property
    def code(self) -> list[str]:
        """The scripts that run: in the page, and Plotly, which the page unpacks."""
        first, page = (text for attributes, text in self.scripts if attributes.get("type") != "text/plain")
        return [first, self.unpacked("plotly"), page]

    @property
    def answers(self) -> dict[str, Any]:
        """The answers that the page asks for."""
        return json.loads(self.unpacked("answers"))
