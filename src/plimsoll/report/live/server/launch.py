"""`serve`: the live page of a folder of runs, at an address, until Ctrl-C.

Only loopback addresses are open to whoever is on this machine; on any other address a token is asked for.
"""

import contextlib
import errno
import importlib.util
import ipaddress
import os
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

from plimsoll.checks import items
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line
from plimsoll.report.live.security import ANY_ADDRESS, LOOPBACK
from plimsoll.text import printable

if TYPE_CHECKING:
    from plimsoll.report.live.run_index import Source

PORT = 8642
_SHORTEST_TOKEN = 16  # characters, where other machines can try
_NEEDED = ("fastapi", "uvicorn", "plotly")
_PARTING_SECONDS = 10.0  # that the end waits for what is still loaded or computed


def serve(
    folder: str | os.PathLike[str],
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    token: str | None = None,
    open_browser: bool = False,
    allow_hosts: Sequence[str] = (),
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a folder's runs as a live web page until Ctrl-C; print its address.

    Args:
        folder: A folder of this machine, where new records are seen within a second. Or the URI of one in a store,
            ``s3://bucket/runs``, which is listed every 10 seconds while somebody looks.
        host: Address to listen at. On any but a loopback address a token is needed.
        port: Port to listen at. 0: a free one.
        token: Access token, of at least 16 characters. Default: generated where one is needed.
        open_browser: Whether to open the page in a browser.
        allow_hosts: Other names of the page, behind a proxy or a forwarded port, as "name:port", or "name" for any
            port. Requests for unknown names are refused.
        on_ready: Called with the page's address once it answers, in place of printing it.

    Raises:
        ArgumentError: There is no such folder, the address or port is not free, or the token is too short.
        MissingExtraError: The extra ``serve`` or a package that a URI needs is not installed.
        RunError: The store does not answer.
    """
    _require()
    allow_hosts = items("serve", "allow_hosts", allow_hosts)
    for host_name in allow_hosts:
        _text("allow_hosts", host_name, 'Name hosts such as "example.org:8642".')
    from plimsoll.report.live.server.app import app
    from plimsoll.report.live.server.uvicorn_loop import run

    place, others = _listening(host, port), set(threading.enumerate())
    try:
        token = _token(token, place)
        made = app(folder, token, [*place.names, *allow_hosts])
        address = place.address(token)
        if on_ready is not None:
            on_ready(address)
        else:
            print(printable(_words(made.answers.live.list.source, address, place, token)), flush=True)  # noqa: T201
        threading.Thread(target=_load_slow_packages, name="plimsoll-packages", daemon=True).start()
        if open_browser:
            webbrowser.open(address)
        run(made, place.listener)
    finally:
        place.listener.close()
        _wait_for(set(threading.enumerate()) - others)


# What a server computes is in daemon threads. Python ends such a thread when the thread next asks for the interpreter,
# also within a function of pyarrow, and the exception that unwinds its stack aborts the whole process there.
def _wait_for(threads: set[threading.Thread]) -> None:
    """Wait for threads of the server that still work, some seconds at most; a second Ctrl-C does not wait."""
    end = time.monotonic() + _PARTING_SECONDS
    with contextlib.suppress(KeyboardInterrupt):
        for thread in threads:
            # An interrupt may have come while one was being started: it cannot be waited for.
            if thread.is_alive() and thread.daemon and thread.name.startswith("plimsoll-"):
                thread.join(max(0.0, end - time.monotonic()))


def _load_slow_packages() -> None:
    """Import what the first verdict and figure need, while the browser starts."""
    # A server that is stopped at once cannot import any more, and would print a traceback. Any other error comes again,
    # and is answered, where the package is needed.
    with contextlib.suppress(Exception):
        import numpy as np

        from plimsoll.diagnosis.tables.trend import trend
        from plimsoll.report.drawing.plotly_parts import empty_figure

        trend(np.arange(9), np.arange(9.0))
        empty_figure("serve", "", "", {}).to_json()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A socket that listens, under the name it was asked for."""

    host: str
    listener: socket.socket

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    @property
    def _address(self) -> "ipaddress.IPv4Address | ipaddress.IPv6Address":
        return ipaddress.ip_address(self.listener.getsockname()[0].partition("%")[0])

    @property
    def is_loopback(self) -> bool:
        return self._address.is_loopback

    @property
    def names(self) -> list[str]:
        """Host names of the page, with its port, since other ports are other pages."""
        names = [*LOOPBACK, _bracketed(self.host)]
        if self._address.is_unspecified:  # of every address of this machine, and of its names
            names = [*LOOPBACK, socket.gethostname(), socket.getfqdn()]
        hosts = [f"{name}:{self.port}" for name in dict.fromkeys(names)]
        return [*hosts, ANY_ADDRESS] if self._address.is_unspecified else hosts

    def address(self, token: str | None) -> str:
        """The page's address, with the token in it."""
        name = socket.gethostname() if self._address.is_unspecified else _bracketed(self.host)
        query = "" if token is None else f"?token={quote(token, safe='')}"
        return f"http://{name}:{self.port}/{query}"


def _words(source: "Source", address: str, place: _Place, token: str | None) -> str:
    lines = [f"Runs in {source.shown}", f"Live page: {address}"]
    if source.poll_seconds > 1:
        lines.append(f"The store is listed every {source.poll_seconds:.0f} s while a page is open.")
    if token is not None:
        lines.append("Anyone with this URL can read the runs. Nothing is encrypted: outside")
        lines.append("a network that you trust, leave --host out and use a tunnel.")
    if place.is_loopback:
        lines.append(f"From another machine: ssh -L {place.port}:localhost:{place.port} {socket.gethostname()}")
    return "\n".join([*lines, "Ctrl-C ends it."])


def _text(name: str, given: object, remedy: str) -> None:
    if not isinstance(given, str):
        raise ArgumentError(f"serve: expected {name} as text; got {given!r}. {remedy}")


def _token(given: str | None, place: _Place) -> str | None:
    if given is None:
        return None if place.is_loopback else secrets.token_urlsafe(24)
    _text("token", given, "Leave it out: one is made where it is needed.")
    if not place.is_loopback and len(given) < _SHORTEST_TOKEN:
        raise ArgumentError(
            f"serve: expected a token of at least {_SHORTEST_TOKEN} characters, since other machines can try; got "
            f"{len(given)}. Leave --token out: one is made."
        )
    if not given or not given.isascii() or not given.isprintable():
        raise ArgumentError("serve: expected a token of printable ASCII characters; got another. Leave --token out.")
    return given


def _listening(host: str, port: int) -> _Place:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"serve: expected a port from 0 to 65535; got {port!r}. Name another with --port; 0 takes a free one."
        )
    if not isinstance(host, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"serve: expected the name or address of this machine; got host={host!r}. Leave it out.")
    bare = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ArgumentError(
            f"serve: expected the name or address of this machine; got --host {host!r}, which is not known. "
            "Leave it out for this machine alone, or name 0.0.0.0 for all of its addresses."
        ) from error
    listener = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _not_had(host, port, error) from error
    return _Place(host=bare, listener=listener)


def _not_had(host: str, port: int, error: OSError) -> ArgumentError:
    if error.errno == errno.EADDRINUSE:
        return ArgumentError(
            f"serve: expected a free port; got port {port}, which another program (another "
            "plimsoll serve?) listens at. Name another with --port, or --port 0 for any free one."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ArgumentError(
            f"serve: expected a port that may be opened; got port {port}, which this user may not. "
            "Name one above 1023 with --port."
        )
    return ArgumentError(
        f"serve: expected an address of this machine; got --host {host!r} ({error.strerror}). Leave it out for this "
        "machine alone, or name 0.0.0.0 for all of its addresses."
    )


def _require() -> None:
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(
                f"serve: expected the package {package}; got none. Install it: {install_line('serve')}"
            )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
