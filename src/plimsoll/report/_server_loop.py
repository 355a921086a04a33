"""Running the live page's application under uvicorn: its open streams end with it, and Ctrl-C leaves no traceback."""

import contextlib
import logging
import socket

from uvicorn import Config, Server

from plimsoll.report._server import App

_PATIENCE_SECONDS = 1  # for answers under way when the end comes


class _Server(Server):
    """A server whose streams, which would keep it open, end when it does."""

    def __init__(self, config: Config, made: App) -> None:
        super().__init__(config)
        self._made = made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends the application first, then as uvicorn does."""
        self._made.close()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off now are no errors
        await super().shutdown(sockets)


def run(made: App, listener: socket.socket) -> None:
    """Serves at a socket that listens, until Ctrl-C."""
    config = Config(
        made,
        log_config=None,
        log_level="warning",
        access_log=False,  # a token in an address must reach no log
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=_PATIENCE_SECONDS,
    )
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn sends itself the signal again once it has ended
        _Server(config, made).run(sockets=[listener])
