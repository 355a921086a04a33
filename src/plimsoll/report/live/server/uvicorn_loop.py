"""The live page's application under uvicorn, with a clean end on Ctrl-C."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator
from typing import Any

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from plimsoll.report.live.security import LONGEST_HEAD_BYTES
from plimsoll.report.live.server.app import App
from plimsoll.text import printable

MOST_CONNECTIONS = 256  # a page has up to six, and one of them is its stream
_PATIENCE_SECONDS = 1  # for answers under way when the end comes
_REQUEST_SECONDS = 10.0  # from a connection's first moment, or its last answer, to its next request
_SENDING_SECONDS = 60.0  # in which a browser takes none of what it is sent
_FULL = (
    b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
    b"plimsoll: too many connections are open. Close pages that follow runs, and ask again.\n"
)


# Connections are few, and each must bring its request, and take its answer, in time: one that does neither is cut off.
class _Connection(H11Protocol):
    """A connection that is cut off when idle, half sent, or unread for too long."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._cut_off_after(_REQUEST_SECONDS, "request")
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(_FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # a request that goes wrong while it is being answered
            self.transport.abort()
        self._follow_request()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no request, or malformed: nothing else answers them."""
        super().send_400_response(msg)
        if self.cycle is not None:  # pyright: ignore[reportUnnecessaryComparison]
            self.cycle.disconnected = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._cut_off_after(_REQUEST_SECONDS, "request")
        self._follow_request()

    def pause_writing(self) -> None:
        """The browser does not take what it is sent."""
        super().pause_writing()
        self._cut_off_after(_SENDING_SECONDS, "sending")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on("sending")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for what in list(self._timers):
            self._go_on(what)

    def _follow_request(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # pyright: ignore[reportUnnecessaryComparison]
            self._go_on("request")

    def _cut_off_after(self, seconds: float, what: str) -> None:
        self._go_on(what)
        self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _go_on(self, what: str) -> None:
        timer = self._timers.pop(what, None)
        if timer is not None:
            timer.cancel()


class _Plain(logging.Formatter):
    """Log formatter that escapes control characters in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class PageServer(Server):
    """A server whose streams, which would keep it open, end when it does."""

    def __init__(self, made: App) -> None:
        super().__init__(
            Config(
                made,
                http=_Connection,
                log_config=None,
                log_level="warning",
                access_log=False,  # a token in an address must reach no log
                server_header=False,
                proxy_headers=False,
                ws="none",
                # `run` closes the application itself. A signal while uvicorn starts would leave its lifespan task
                # behind, which asyncio reports with a traceback.
                lifespan="off",
                h11_max_incomplete_event_size=LONGEST_HEAD_BYTES,
                timeout_graceful_shutdown=_PATIENCE_SECONDS,
            )
        )
        self._made = made
        self._captures = False

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Context in which a signal ends the server in order; uvicorn enters it again once the event loop runs."""
        if self._captures:
            yield
            return
        self._captures = True
        with super().capture_signals():
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the application first, then as uvicorn does."""
        self._made.close()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off now are no errors
        await super().shutdown(sockets)
        # Those that took longer than it waits for are still open, and would be when the loop is closed.
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # the loop's next turn ends them


def run(made: App, listener: socket.socket) -> None:
    """Serves at a socket that listens, until Ctrl-C."""
    server = PageServer(made)
    with _plain_logs(), contextlib.suppress(KeyboardInterrupt):  # uvicorn sends itself the signal again at its end
        try:
            with server.capture_signals():  # else one that comes while asyncio makes its loop leaves tracebacks
                server.run(sockets=[listener])
        finally:
            made.close()


@contextlib.contextmanager
def _plain_logs() -> Generator[None]:
    """Log the running server to stderr, without terminal control characters."""
    handler, root = logging.StreamHandler(), logging.getLogger()
    handler.setFormatter(_Plain())
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
