"""Requests and runs that somebody made to do harm, drawn at random by a seed."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from plimsoll.formats import BLOCKS, ELEMENTS
from plimsoll.report.figure_registry import figures_of
from plimsoll.runs import Batch, Event, RunWriter, Scalars
from tests.support.report.hostile_run import NAMES
from tests.support.runs import making

MARK = "<script>alert(1)</script>"  # in every run, as the name of something
TEXTS = (*NAMES, MARK, "", ".", "..", "/", "%", "%00", "\0", "a" * 70_000, "9" * 5000, "nan", "-inf", "1e999",
         "\udc80", "{}", "gradients", "fp16", "e11m52", "\u0661", "\N{GRINNING FACE}" * 50, "%s%n", "$(id)",
         "__class__")  # fmt: skip
NUMBERS = (0, 1, -1, 255, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, 1e308, -1e-308, float("nan"), float("inf"),
           float("-inf"), 0.5, True, False)  # fmt: skip
COLUMNS = (0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 1e308, -1e308, float("nan"), float("inf"), 5e-324)


# -- runs


def sound_run(path: Path) -> Path:
    """A small run of every kind of record, one name of which is markup."""
    tensors = [x for x in making.tensors(8) if x.numel()][:3]
    with RunWriter(path, settings={"every": 1, MARK: MARK}, flush_seconds=600) as writer:
        for step in range(6):
            writer.write(Scalars(step=step, values={"loss": 2.0 - 0.1 * step, "scale": 1024.0, "nonfinite": 0.0}))
            names = [(c, n) for c in ("gradients", "weights", "updates") for n in ("a.weight", MARK, "b.bias")]
            series = np.array([writer.series(c, n, format="fp16") for c, n in names])
            rows = making.rows_of(tensors * 3)
            writer.write(Batch(step=step, rows=rows, index=np.arange(9), series=series, scales=np.ones(9)))
            writer.write(Event(step=step, kind="trigger", message=MARK, details={MARK: [MARK]}))
    return path


def hostile_run(draw: random.Random, sound: Path, path: Path) -> Path:
    """A copy of a sound run with a few things in it replaced: entries of its manifest, columns of its files."""
    shutil.copytree(sound, path)
    for _ in range(draw.randint(1, 4)):
        draw.choice((_manifest, _manifest, _column, _file))(draw, path)
    return path


def _manifest(draw: random.Random, path: Path) -> None:
    place = path / "run.json"
    try:
        content = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError):
        return
    holder, key = _place_in(draw, content)
    change = draw.randrange(4)
    if change == 0:
        del holder[key]
    elif change == 1 and isinstance(holder, dict):
        holder[draw.choice(TEXTS)[:1000]] = holder.pop(key)
    elif change == 2 and isinstance(holder, dict):
        holder[draw.choice(TEXTS)] = copy.deepcopy(holder[key])
    else:
        holder[key] = value(draw)
    place.write_text(json.dumps(content), "utf-8")


def _place_in(draw: random.Random, content: Any) -> tuple[Any, Any]:
    holder, key = content, draw.choice(list(content))
    while isinstance(holder[key], dict | list) and holder[key] and draw.random() < 0.8:
        holder = holder[key]
        key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
    return holder, key


def value(draw: random.Random, deep: int = 0) -> Any:
    """Any JSON, also such as no program writes."""
    kind = draw.randrange(7 if deep < 3 else 5)
    if kind < 2:
        return draw.choice(TEXTS)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind == 4:
        return None
    if deep == 0 and draw.random() < 0.1:
        nested: Any = []
        for _ in range(400):
            nested = [nested]
        return nested
    many = draw.choice((0, 1, 3))
    if kind == 5:
        return [value(draw, deep + 1) for _ in range(many)]
    return {draw.choice(TEXTS)[:100]: value(draw, deep + 1) for _ in range(many)}


def _column(draw: random.Random, path: Path) -> None:
    place = draw.choice([p for p in sorted(path.rglob("*.parquet")) if p.stat().st_size] or [path])
    try:
        table = pq.ParquetFile(place).read()
    except (OSError, pa.ArrowException):
        return
    at = draw.randrange(table.num_columns)
    field = table.schema.field(at)
    if draw.random() < 0.2:
        table = table.drop_columns([field.name])
    else:
        table = table.set_column(at, field.name, _drawn_column(draw, field.type, table.column(at)))
    pq.write_table(table, place)


def _drawn_column(draw: random.Random, kind: pa.DataType, old: Any) -> Any:
    """A column of the same length and kind, of extremes; or one of another kind."""
    values, many = old.to_pylist(), len(old)
    if draw.random() < 0.2:
        return pa.array([draw.choice(TEXTS)[:50].encode("utf-8", "replace").decode() for _ in range(many)])
    changed = [draw.choice(COLUMNS) if draw.random() < 0.5 else each for each in values]
    texts = [draw.choice((None, MARK, "\x1b[2J", "x" * 500)) if draw.random() < 0.5 else each for each in values]
    for candidate in (changed, texts, [None] * many):
        try:
            return pa.array(candidate, kind)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue
    return old


def _file(draw: random.Random, path: Path) -> None:
    files = [p for p in sorted(path.rglob("*")) if p.is_file()]
    if not files:
        return
    place = draw.choice(files)
    change = draw.randrange(5)
    if change == 0:
        place.unlink()
    elif change == 1:
        place.write_bytes(place.read_bytes()[: draw.randrange(place.stat().st_size + 1)])
    elif change == 2:
        place.write_bytes(draw.randbytes(draw.choice((0, 1, 100))))
    elif change == 3:
        place.with_name(f"9{place.name[1:]}").write_bytes(place.read_bytes())
    else:
        place.rename(place.with_name(draw.choice(("x", MARK.replace("/", "_"), "\x1b[2J\n"))))


# -- requests


def questions(run_id: str, other: str) -> list[str]:
    """Everything that the page asks about a run, and a few things more."""
    run = f"/api/runs/{quote(run_id, safe='')}"
    pair = f"a={quote(run_id, safe='')}&b={quote(other, safe='')}"
    figures = [f"{run}/figure/{name}" for name in figures_of(1)]
    named = "collection=gradients&name=a.weight"
    return [
        "/api/runs", "/api/runs?column=every&column=deep", run, *figures, f"{run}/scalar?name=loss",
        f"{run}/scalar?name=nonfinite", f"{run}/whatif?format=fp16", f"{run}/whatif?format=e11m52&collection=weights",
        f"{run}/whatif?format=mxfp8_e4m3", f"{run}/figure/spectrogram?{named}&formats=e4m3,fp64",
        f"{run}/figure/heatmap?statistic=lost&format=e5m2", f"{run}/figure/code_usage?{named}&format=e4m3",
        f"{run}/figure/loss_and_scale?finding=0", f"{run}/figure/underflow_over_time?finding=0", f"/api/compare?{pair}",
        *(f"/api/compare/figure/{name}?{pair}" for name in figures_of(2)),
    ]  # fmt: skip


def request(draw: random.Random, port: int, runs: list[str]) -> bytes:
    """A request of any kind: right in most things, and wrong in some."""
    method = draw.choice(
        ["GET"] * 12 + ["HEAD", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "get", "\x00", "GET " * 9]
    )
    target = _target(draw, runs)
    headers = [f"Host: 127.0.0.1:{port}", "Connection: close"]
    headers += [_header(draw) for _ in range(draw.choice((0, 0, 1, 3)))]
    if draw.random() < 0.05:
        draw.shuffle(headers)
        headers.pop()
    version = draw.choice(["HTTP/1.1"] * 15 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9", ""])
    whole = "\r\n".join([f"{method} {target} {version}", *headers, "", ""]).encode("utf-8", "replace")
    body = draw.choice((b"", b"", b"", b"x" * 100, b"5\r\nhello\r\n0\r\n\r\n", draw.randbytes(50), whole))
    spoilt = bytearray(whole + body)
    for _ in range(draw.choice((0, 0, 0, 0, 1, 5))):
        spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
    return bytes(spoilt)


def _target(draw: random.Random, runs: list[str]) -> str:
    text: Callable[[], str] = lambda: quote(draw.choice(TEXTS)[:3000].encode("utf-8", "replace"), safe="")  # noqa: E731
    run = quote(draw.choice(runs), safe="")
    known = questions(draw.choice(runs), draw.choice(runs))
    figure = draw.choice([*figures_of(1), *figures_of(2), text()])
    formats = [fmt.name for fmt in (*ELEMENTS, *BLOCKS)]
    words = (
        "collection",
        "name",
        "statistic",
        "format",
        "formats",
        "shift",
        "finding",
        "column",
        "a",
        "b",
        "token",
        "run",
        text(),
    )
    query = "&".join(
        f"{draw.choice(words)}={draw.choice([text(), draw.choice(formats), str(draw.choice(NUMBERS))[:400], run])}"
        for _ in range(draw.choice((0, 1, 2, 3)))
    )
    path = draw.choice((
        draw.choice(known), draw.choice(known), f"/api/runs/{run}/figure/{figure}", f"/api/runs/{run}/whatif",
        f"/api/runs/{run}/scalar", "/api/runs", "/api/compare", f"/api/compare/figure/{figure}",
        f"/api/runs/{text()}", f"/{text()}", f"/assets/{text()}", "/",
        f"/api/runs/{run}/{text()}", f"//{text()}", "*", "http://evil.example/", f"/api/../{run}", f"/assets/../{run}",
    ))  # fmt: skip
    return f"{path}{'&' if '?' in path else '?'}{query}" if query else path


def _header(draw: random.Random) -> str:
    name = draw.choice(("Cookie", "Authorization", "Sec-Fetch-Site", "If-None-Match", "Range", "Expect", "Upgrade",
                        "Content-Length", "Transfer-Encoding", "Host", "X" * 2000, "Accept-Encoding"))  # fmt: skip
    text = draw.choice(TEXTS)[:500].replace("\n", "").replace("\r", "")
    words = ("Bearer x", "cross-site", "100-continue", "websocket", "chunked", "-1", "99999999999", "a=b; c",
             "bytes=0-1", "evil.example", "gzip, deflate", text)  # fmt: skip
    return f"{name}: {draw.choice(words)}"
