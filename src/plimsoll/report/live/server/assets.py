"""The static files of the live page: those in `page`, Plotly's own script, and the figures' templates."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from plimsoll.report.drawing.theme import TEMPLATES

_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file's content, its kind, and a digest by which a browser asks whether it has changed."""

    body: bytes
    kind: str
    digest: str


def assets() -> dict[str, Asset]:
    """All files by their path below /assets/; a path that is not here is not there."""
    import plotly  # pyright: ignore[reportMissingTypeStubs]

    page = Path(__file__).parents[1] / "page"
    found = {
        path.relative_to(page).as_posix(): _asset(path.read_bytes(), path.suffix)
        for path in sorted(page.rglob("*"))
        if path.suffix in _KINDS and path.is_file()
    }
    script = Path(plotly.__file__).with_name("package_data") / "plotly.min.js"
    found["plotly.min.js"] = _asset(script.read_bytes(), ".js")
    found["templates.json"] = _asset(json.dumps(dict(TEMPLATES), allow_nan=False).encode(), ".json")
    return found


def _asset(body: bytes, suffix: str) -> Asset:
    digest = hashlib.blake2s(body, digest_size=12).hexdigest()
    return Asset(body=body, kind=_KINDS[suffix], digest=f'"{digest}"')
