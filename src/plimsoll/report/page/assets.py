"""Files of the front end: served one by one by the live page, bundled into one file by the report."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from plimsoll.report.drawing.theme import TEMPLATES

FILES = Path(__file__).parent / "files"
PLOTLY = FILES / "plotly.min.js"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_IMPORT = re.compile(r'^import \{ ([^}]+) \} from "(\./|\.\./)([\w/]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file's content, its kind, and a digest by which a browser asks whether it has changed."""

    body: bytes
    kind: str
    digest: str


def assets() -> dict[str, Asset]:
    """Return all files by their path below /assets/."""
    found = {
        path.relative_to(FILES).as_posix(): _asset(path.read_bytes(), path.suffix)
        for path in sorted(FILES.rglob("*"))
        if path.is_file()
    }
    found["templates.json"] = _asset(json.dumps(dict(TEMPLATES), allow_nan=False).encode(), ".json")
    return found


def _asset(body: bytes, suffix: str) -> Asset:
    digest = hashlib.blake2s(body, digest_size=12).hexdigest()
    return Asset(body=body, kind=_KINDS[suffix], digest=f'"{digest}"')


def script() -> str:
    """Return all modules of the page as one script.

    A file that is opened without a server cannot import modules, so each becomes a function that runs after those that
    it imports. Imports and exports have one form throughout the page: `import { a } from "./b.js"`, and `export` before
    a declaration.
    """
    done: dict[Path, str] = {}
    _add(FILES / "js" / "main.js", done)
    return '"use strict";\n' + "".join(done.values())


def _add(path: Path, done: dict[Path, str]) -> None:
    text = path.read_text("utf-8")
    for match in _IMPORT.finditer(text):
        imported = (path.parent / match[2] / match[3]).resolve()
        if imported not in done:
            _add(imported, done)
    exported = ", ".join(match[2] for match in _EXPORT.finditer(text))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(lambda m: f"const {{ {m[1]} }} = {_variable(m[3])};\n", text))
    done[path.resolve()] = f"const {_variable(path.name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _variable(name: str) -> str:
    return f"{Path(name).stem}_module"
