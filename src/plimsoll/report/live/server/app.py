"""`app`: the live page and API as an ASGI application, behind the middleware.

It is the `SecurityMiddleware`. Only `serve` loads FastAPI. Questions are answered in `Turns`, so a slow run delays no
other; `Live` keeps the runs, `Streams` reports what is new.
"""

import contextlib
import gzip
import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI, Request, Response

from plimsoll.errors import ArgumentError, FormatError, NotRecordedError, PlimsollError, RunError, StateError
from plimsoll.report.live.security import LOOPBACK, Receive, Scope, SecurityMiddleware, Send, is_api
from plimsoll.report.live.server.answers import Api
from plimsoll.report.live.waiting_browsers import MOST_RUNS, BusyError, EventStream, Streams, Turns
from plimsoll.report.page.answers import encoded, within
from plimsoll.report.page.assets import Asset, assets

# Newer versions of FastAPI send traces where the environment says so. What is asked about runs never leaves here.
_SILENT: dict[str, Any] = {
    "telemetry": dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False)
}
_STATUS: tuple[tuple[type[Exception], int], ...] = (
    (BusyError, 429),
    (NotRecordedError, 404),
    (ArgumentError, 422),
    (FormatError, 422),
    (StateError, 409),
    (RunError, 409),
    (PlimsollError, 422),
)


_LOG = logging.getLogger("plimsoll")

# The address of a file holds a digest of all files, so that a browser asks for each of them once.
_VERSION = re.compile(r"^[0-9a-f]{16}/")  # before a file's name in its address
_KEEP, _ASK_AGAIN = "private, max-age=31536000, immutable", "no-cache"
_REFUSED = re.compile(r"\s*q=0(\.0*)?\s*$")
_GZIP = b"\x1f\x8b"
_PACKED_FROM_BYTES = 1400  # what fits into one packet is not compressed


class App:
    """The ASGI application, with its `answers` and `streams`; `close` ends both."""

    def __init__(self, answers: Api, streams: Streams, gate: SecurityMiddleware) -> None:
        self.answers, self.streams, self._gate = answers, streams, gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        await self._gate(scope, receive, send)

    def close(self) -> None:
        """Ends the streams and the work in the background."""
        self.streams.close()
        self.answers.close()


def app(
    folder: str | os.PathLike[str],
    token: str | None = None,
    hosts: Iterable[str] = LOOPBACK,
    *,
    poll_seconds: float | None = None,
) -> App:
    """Return the live page of a folder of runs, or a URI, for any ASGI server.

    Args:
        folder: The folder.
        token: Access token. Default: none, which is for loopback addresses only.
        hosts: Names of the page, each with its port, or without for any port. Requests for other names are refused.
        poll_seconds: Time between two looks at open runs. Default: 1, and 10 in a store, whose listings are not renewed
            sooner in any case.

    Raises:
        ArgumentError: There is no such folder.
        RunError: The store does not answer.
    """
    answers = Api(folder)
    streams = Streams(
        answers.look, poll_seconds=answers.live.list.source.poll_seconds if poll_seconds is None else poll_seconds
    )
    inner = _application(answers, streams)
    return App(answers, streams, SecurityMiddleware(inner, hosts=hosts, token=token))


def _application(answers: Api, streams: Streams) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        streams.close()
        answers.close()

    inner = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan, redirect_slashes=False, **_SILENT
    )
    _add_errors(inner, answers)
    _add_page(inner, *assets())
    _add_api(inner, answers, Turns())

    @inner.api_route("/api/stream", methods=["GET", "HEAD"], response_model=None)
    async def stream(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        runs = request.query_params.getlist("run")
        if len(runs) > MOST_RUNS:
            raise ArgumentError(
                f"serve: expected at most {MOST_RUNS} runs in one stream; got {len(runs)}. Watch fewer of them."
            )
        return _AsResponse(EventStream(streams, runs))

    return inner


def _add_api(inner: FastAPI, answers: Api, turns: Turns) -> None:
    def get(path: str, answer: Callable[[Request], bytes]) -> None:
        async def endpoint(request: Request) -> Response:
            runs, takes_gzip = _runs(request), _takes_gzip(request)
            try:
                body = await turns.answer(runs, lambda: _packed(answer(request), takes_gzip))
            except Exception as error:  # a run may hold anything; one that cannot be answered about is no 500
                if isinstance(error, PlimsollError) or not any(runs):
                    raise
                _LOG.exception("plimsoll serve: %s could not be answered", request.url.path)
                raise RunError(
                    "serve: expected a run that can be read and judged; got one for which that fails "
                    f"({type(error).__name__}). The terminal of plimsoll serve says where."
                ) from error
            headers = {"cache-control": "no-store", "vary": "accept-encoding"}
            if body.startswith(_GZIP):  # JSON never begins so
                headers["content-encoding"] = "gzip"
            return Response(body, media_type="application/json", headers=headers)

        inner.api_route(path, methods=["GET", "HEAD"], response_model=None)(endpoint)

    get("/api/runs", lambda request: answers.runs(request.query_params.getlist("column")))
    get("/api/figures", lambda _: answers.figures())
    get("/api/runs/{id}", lambda request: answers.run(_part(request, "id")))
    get(
        "/api/runs/{id}/figure/{figure}",
        lambda request: answers.figure(_part(request, "id"), _part(request, "figure"), _query(request)),
    )
    get("/api/runs/{id}/scalar", lambda request: answers.scalar(_part(request, "id"), _query(request)))
    get("/api/runs/{id}/whatif", lambda request: answers.whatif(_part(request, "id"), _query(request)))
    get("/api/compare", lambda request: answers.compare(*_pair(_query(request))))
    get("/api/compare/figure/{figure}", lambda request: _compare_figure(answers, request))


def _packed(body: bytes, takes_gzip: bool) -> bytes:
    """Return an answer with gzip, if the client takes that and the answer is large."""
    if not takes_gzip or len(body) < _PACKED_FROM_BYTES:
        return body
    # Level 1: a figure of 300 KB shrinks to a third in 4 ms, and level 6 takes 15 ms for a tenth less.
    return gzip.compress(body, 1, mtime=0)


def _compare_figure(answers: Api, request: Request) -> bytes:
    query = _query(request)
    first, second = _pair(query)
    rest = {key: value for key, value in query.items() if key not in ("a", "b")}
    return answers.compare_figure(first, second, _part(request, "figure"), rest)


def _runs(request: Request) -> tuple[str, ...]:
    """The runs that a question is about; of the list, "" is."""
    if "id" in request.path_params:
        return (_part(request, "id"),)
    return tuple(request.query_params.get(name, "") for name in ("a", "b"))


def _part(request: Request, name: str) -> str:
    """A segment of the path, whose quoting the gate has left as it was."""
    # A slash at its end is left out: browsers take "." (the id of the served folder itself) out of an address, not
    # "./".
    return unquote(str(request.path_params[name]), errors="replace").removesuffix("/")


def _query(request: Request) -> dict[str, str]:
    return {key: value for key, value in request.query_params.items() if key != "token"}


def _pair(query: dict[str, str]) -> tuple[str, str]:
    if not query.get("a") or not query.get("b"):
        raise ArgumentError("serve: expected two runs, a and b; got fewer. Name both in the address.")
    return query["a"], query["b"]


def _add_page(inner: FastAPI, version: str, files: Mapping[str, Asset]) -> None:
    def send(request: Request, file: Asset, cache: str) -> Response:
        packed = file.packed is not None and _takes_gzip(request)
        # A packed body is another representation, and by HTTP has another ETag.
        digest = f'{file.digest[:-1]}-gzip"' if packed else file.digest
        headers = {"etag": digest, "cache-control": cache, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == digest:
            return Response(status_code=304, headers=headers)
        if packed:
            return Response(file.packed, media_type=file.kind, headers={**headers, "content-encoding": "gzip"})
        return Response(file.body, media_type=file.kind, headers=headers)

    @inner.api_route("/", methods=["GET", "HEAD"], response_model=None)
    async def index(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return send(request, files["index.html"], _ASK_AGAIN)

    @inner.api_route("/assets/{path:path}", methods=["GET", "HEAD"], response_model=None)
    async def asset(request: Request, path: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        name = _VERSION.sub("", path)
        if name not in files:
            raise NotRecordedError("serve: expected a file of the live page; got an unknown address. Go to /.")
        # A page that was opened before the server was replaced asks for the former version: it gets the present file.
        return send(request, files[name], _KEEP if path.startswith(f"{version}/") else _ASK_AGAIN)


def _takes_gzip(request: Request) -> bool:
    offers = (offer.partition(";") for offer in request.headers.get("accept-encoding", "").lower().split(","))
    return any(name.strip() == "gzip" and _REFUSED.match(weight) is None for name, _, weight in offers)


def _add_errors(inner: FastAPI, answers: Api) -> None:
    def refusal(request: Request, status: int, text: str) -> Response:
        if is_api(request.url.path):
            return Response(encoded({"error": text}), status, media_type="application/json")
        return Response(f"{text}\n", status, media_type="text/plain")

    async def refused(request: Request, error: Exception) -> Response:
        status = next(number for kind, number in _STATUS if isinstance(error, kind))
        return refusal(request, status, within(str(error), answers.root))

    async def unknown(request: Request, _: Exception) -> Response:
        return refusal(request, 404, "plimsoll: there is nothing at this address. The page begins at /.")

    async def defect(request: Request, _: Exception) -> Response:  # uvicorn prints the traceback
        return refusal(request, 500, "plimsoll: internal error. See the terminal that runs plimsoll serve.")

    handlers: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
        PlimsollError: refused, 404: unknown, 405: unknown, Exception: defect
    }  # fmt: skip
    for kind, handler in handlers.items():
        inner.add_exception_handler(kind, handler)


class _AsResponse(Response):
    """An event stream, as what FastAPI takes for an answer."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._stream(scope, receive, send)
