"""Files of the front end: single ones for the live page, one for the report."""

import functools
import gzip
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plimsoll.report.drawing.plotly_parts import TEMPLATES

FILES = Path(__file__).parent / "files"
PLOTLY = FILES / "plotly.min.js"
_CLASSIC = ("js/first.js", "plotly.min.js")  # scripts that are no modules
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
    """File of the page."""

    body: bytes
    packed: bytes | None  # the content compressed with gzip; None: it would not be much smaller
    kind: str  # the media type
    digest: str  # digest of the content, in quotes, as an ETag


@functools.cache
def assets() -> tuple[str, Mapping[str, Asset]]:
    """Return the page's version, a digest of its files, and the files by path.

    Paths are those below /assets/. Addresses in index.html begin with /assets/VERSION, so a browser can keep what it
    fetched from them for ever.
    """
    files = {
        path.relative_to(FILES).as_posix(): _asset(path.read_bytes(), path.suffix)
        for path in sorted(FILES.rglob("*"))
        if path.is_file()
    }
    files["templates.json"] = _asset(json.dumps(dict(TEMPLATES), allow_nan=False).encode(), ".json")
    version = hashlib.blake2s(repr([(name, f.digest) for name, f in files.items()]).encode(), digest_size=8).hexdigest()
    files["index.html"] = _asset(_index(files, version).encode(), ".html")
    return version, files


def _index(files: Mapping[str, Asset], version: str) -> str:
    """Return index.html with versioned addresses and the names of all modules.

    A browser finds out about a module only when it has read one that imports it. With all names in index.html it
    fetches them at once: over a tunnel of 50 ms that saves three round trips.
    """
    modules = (name for name in files if name.endswith(".js") and name not in _CLASSIC)
    hints = "".join(f'    <link rel="modulepreload" href="/assets/{name}">\n' for name in modules)
    page = files["index.html"].body.decode().replace('    <script type="module"', f'{hints}    <script type="module"')
    return page.replace('"/assets', f'"/assets/{version}')


def _asset(body: bytes, suffix: str) -> Asset:
    digest = hashlib.blake2s(body, digest_size=12).hexdigest()
    packed = gzip.compress(body, 9, mtime=0)
    small = len(packed) < 0.9 * len(body)
    return Asset(body=body, packed=packed if small else None, kind=_KINDS[suffix], digest=f'"{digest}"')


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
