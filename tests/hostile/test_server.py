"""The live page against requests and runs that were made to do harm: hundreds of kinds, at random, by a seed.

`PLIMSOLL_FUZZ` is the number of cases (``make fuzz``); without it there are few.
"""

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from plimsoll.diagnosis import View
from plimsoll.report import html
from plimsoll.report.live.security import HEADERS
from plimsoll.runs import Run
from tests.support.hostile import server as hostile
from tests.support.patience import HANG_SECONDS
from tests.support.report.served import Served, served

CASES = int(os.environ.get("PLIMSOLL_FUZZ", "150"))
RUNS = max(CASES // 10, 1)  # of these are runs, each with all questions about it
SEED = 20_250_601


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    hostile.sound_run(root / "sound")
    hostile.sound_run(root / "deep" / hostile.MARK.replace("/", "_"))
    return root


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Served]:
    with served(folder) as found:
        yield found


def sent(site: Served, request: bytes) -> bytes:
    """What the server answers: nothing where it cuts the connection off. A `TimeoutError` is a server that hangs."""
    found = b""
    with (
        contextlib.suppress(BrokenPipeError, ConnectionError),
        socket.create_connection(("127.0.0.1", site.port), HANG_SECONDS) as line,
    ):
        line.sendall(request)
        if b"\r\n\r\n" not in request:  # it is none yet, and no more of it comes
            line.shutdown(socket.SHUT_WR)
        while not _is_whole(found, request) and (more := line.recv(1 << 16)):
            found += more
    return found.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if request.startswith(b"HEAD") and found else found


def _is_whole(answer: bytes, request: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end or head.startswith(b"HTTP/1.1 100"):
        return False
    length = re.search(rb"\r\ncontent-length: (\d+)", head.lower())
    endless = b"text/event-stream" in head  # whose first bytes are enough
    return request.startswith(b"HEAD") or endless or (length is not None and len(body) >= int(length[1]))


def checked(answer: bytes, request: object) -> int | None:
    """The status of an answer that is as answers should be."""
    answer = answer.removeprefix(b"HTTP/1.1 100 \r\n\r\n")
    if not answer:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    assert 200 <= status < 500, (request, answer[:500])
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    kind, body = fields.get(b"content-type", b""), body[: int(fields.get(b"content-length", len(body)))]
    if fields.get(b"content-encoding") == b"gzip" and body:
        body = gzip.decompress(body)
    if status == 400:  # no request at all, which uvicorn says
        assert kind.startswith(b"text/plain") and (not body or b"Invalid HTTP request received." in body)
        return status
    assert all(fields.get(name) == text.lower() for name, text in HEADERS), (request, head)
    if kind.startswith(b"text/html"):
        assert hostile.MARK.encode() not in body  # no page is made of what a run holds
    elif kind.startswith(b"application/json"):
        if not body:  # of HEAD
            return status
        content = json.loads(body, parse_constant=lambda constant: pytest.fail(f"{constant} in {request}"))
        if status >= 400:
            assert list(content) == ["error"] and "Traceback" not in content["error"], request
    elif status >= 400:
        assert kind.startswith(b"text/plain") and len(body.splitlines()) <= 1, request
    return status


def asked(site: Served, path: str) -> int | None:
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{site.port}\r\nConnection: close\r\n\r\n".encode()
    return checked(sent(site, request), path)


def test_no_request_fails_or_hangs_and_the_page_goes_on(site: Served, caplog: pytest.LogCaptureFixture) -> None:
    draw = random.Random(SEED)
    runs = ["sound", f"deep/{hostile.MARK.replace('/', '_')}", "none", "."]
    open_lines: list[socket.socket] = []
    try:
        for _ in range(CASES - RUNS):
            request = hostile.request(draw, site.port, runs)
            if draw.random() < 0.2:  # half of it, and no end
                line = socket.create_connection(("127.0.0.1", site.port), HANG_SECONDS)
                line.sendall(request[: draw.randrange(len(request))])
                open_lines.append(line)
                if len(open_lines) > 60:
                    open_lines.pop(0).close()
            else:
                checked(sent(site, request), request)
    finally:
        for line in open_lines:
            line.close()
    assert not [each for each in caplog.records if each.exc_info]  # the runs are sound
    assert [asked(site, path) for path in ("/", "/api/runs", "/api/runs/sound/whatif?format=fp16")] == [200] * 3


@pytest.mark.filterwarnings("ignore")  # numbers that no training has: what matters here is the answer
def test_no_run_fails_the_page_or_takes_the_others_along(site: Served, folder: Path, tmp_path: Path) -> None:
    statuses: dict[int | None, int] = {}
    made = 0
    for case in range(RUNS):
        draw = random.Random(f"{SEED} {case}")
        name = f"case {case}"
        hostile.hostile_run(draw, folder / "sound", folder / name)
        for path in hostile.questions(name, "sound"):
            status = asked(site, path)
            statuses[status] = statuses.get(status, 0) + 1
        assert asked(site, "/api/runs/sound/figure/record") == 200
        if case % 10 == 0:
            made += _report_is_clean(folder / name, tmp_path)
        shutil.rmtree(folder / name)
    assert statuses[200] and None not in statuses  # some of it can be answered, and all of it is
    assert made  # some reports, so their markup was looked at
    assert asked(site, "/api/runs/sound/whatif?format=fp16") == 200


def _report_is_clean(run: Path, tmp_path: Path) -> bool:
    """A report of a run that can be read holds none of its markup."""
    from plimsoll.errors import PlimsollError

    try:
        page = html(View(Run(run, warn=False)), tmp_path / "report.html")
    except (PlimsollError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError, OSError):
        return False
    assert hostile.MARK not in page.read_text("utf-8")
    return True
