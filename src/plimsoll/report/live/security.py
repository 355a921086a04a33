"""`SecurityMiddleware`: checks of all requests to the live page. Promise P9.

- The Host header must be one that the page is known under, or else a foreign name that is made to resolve to this
  machine (DNS rebinding) would let any web page read the runs: 403.
- Where a token is asked for it comes as ``Authorization: Bearer``, as the cookie, or once as ``?token=``, which is
  answered with the cookie (HttpOnly, SameSite=Strict): else 401.
- Only GET and HEAD: 405, without a body: 413, and with a head of at most 16 KB: 431. Pages of other origins cannot ask
  the API even without seeing the answer: 403.
- Answers allow no script but the page's own, no framing, no guessing of types, no referrer, and no sharing with other
  origins (there are no CORS headers).

Behind the gate paths stay as they came, quoted, so that a slash within a segment (``a%2Fb``) separates nothing.
"""

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from http import cookies
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
ANY_ADDRESS = "*address"  # in `hosts`: any IP address; a name is what rebinding needs

# Plotly writes its style sheet into the page, and pictures to save into data and blob addresses.
POLICY = (
    "default-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_METHODS = ("GET", "HEAD")
LONGEST_HEAD_BYTES = 16 << 10  # of a request: its address and headers


class SecurityMiddleware:
    """An ASGI application before another, which sees only requests that pass.

    `hosts`: names, addresses (IPv6 in brackets), each with a port, or without for any port. `token`: None for none.
    """

    def __init__(self, inner: Application, *, hosts: Iterable[str], token: str | None) -> None:
        self._inner, self._token = inner, token
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request itself, or hands it on."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":  # no web sockets here
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers(scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _answer(scope, send, *refusal)
            return
        token = dict(parse_qsl(_text(scope.get("query_string", b"")))).get("token")
        if self._token is None or token is None:
            await self._pass(scope, receive, send, [])
        elif scope["path"].startswith("/api/"):
            await self._pass(scope, receive, send, [self._cookie()])
        else:
            await _redirect(scope, send, self._cookie())

    def _refusal(self, scope: Scope, headers: Mapping[str, list[str]]) -> "tuple[int, str, list[_Header]] | None":
        """Status, text and headers of why a request may not pass; None where it may."""
        if not self._is_known(headers.get("host", [])):
            return 403, (
                "plimsoll: this page does not accept that address. Open the one that plimsoll serve printed; behind a "
                "proxy or a forwarded port, name the other one with --allow-host."
            ), []  # fmt: skip
        size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
        if size + sum(len(name) + len(value) for name, value in scope["headers"]) > LONGEST_HEAD_BYTES:
            return 431, f"plimsoll: this request is longer than {LONGEST_HEAD_BYTES:,} bytes. Ask for less.", _LAST
        if scope["method"] not in _METHODS:
            return 405, "plimsoll: the live page only reads. Use GET.", [
                (b"allow", ", ".join(_METHODS).encode()), *_LAST
            ]  # fmt: skip
        if headers.get("content-length", ["0"]) != ["0"] or "transfer-encoding" in headers:
            return 413, "plimsoll: the live page takes no content. Ask without a body.", _LAST
        if scope["path"].startswith("/api/") and "cross-site" in headers.get("sec-fetch-site", []):
            return 403, "plimsoll: only the live page itself may ask for this.", []
        if self._token is not None and not self._is_authorised(scope, headers, self._token):
            return 401, (
                "plimsoll: this page needs its token. Open the whole address that plimsoll serve printed "
                "(it ends in ?token=...), or send the header Authorization: Bearer TOKEN."
            ), [(b"www-authenticate", b"Bearer")]  # fmt: skip
        return None

    def _is_known(self, hosts: list[str]) -> bool:
        if len(hosts) != 1:
            return False
        host = hosts[0].strip().lower()
        name, _, port = host.rpartition(":")
        if not name or host.endswith("]"):
            name, port = host, "80"
        return (
            f"{name}:{port}" in self._hosts or name in self._hosts or (ANY_ADDRESS in self._hosts and _is_address(name))
        )

    def _is_authorised(self, scope: Scope, headers: Mapping[str, list[str]], token: str) -> bool:
        bearer = [h.partition(" ")[2].strip() for h in headers.get("authorization", []) if h[:7].lower() == "bearer "]
        query = [value for key, value in parse_qsl(_text(scope.get("query_string", b""))) if key == "token"]
        name, value = cookie_of(token)
        values = [morsels[name].value for morsels in map(_morsels, headers.get("cookie", [])) if name in morsels]
        checked = [_equal(sent, token) for sent in (*bearer, *query)] + [_equal(sent, value) for sent in values]
        return any(checked)

    def _cookie(self) -> "_Header":
        name, value = cookie_of(self._token or "")
        return b"set-cookie", f"{name}={value}; HttpOnly; SameSite=Strict; Path=/".encode()

    async def _pass(self, scope: Scope, receive: Receive, send: Send, more: "list[_Header]") -> None:
        raw = scope.get("raw_path") or quote(scope["path"]).encode()

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *HEADERS, *more]}
            await send(message)

        await self._inner({**scope, "path": _text(raw)}, receive, with_headers)


_Header = tuple[bytes, bytes]
_LAST: list[_Header] = [(b"connection", b"close")]  # what follows on the connection is not looked at


def cookie_of(token: str) -> tuple[str, str]:
    """Return the cookie's name and value, both derived from the token."""
    value = hmac.new(token.encode(), b"plimsoll live page", hashlib.sha256).hexdigest()
    return f"plimsoll-{value[:12]}", value[12:]


def is_api(path: str) -> bool:
    """Return whether the client expects JSON."""
    return path.startswith("/api/")


async def _answer(scope: Scope, send: Send, status: int, text: str, more: list[_Header]) -> None:
    as_json = is_api(scope["path"])
    body = json.dumps({"error": text}).encode() if as_json else f"{text}\n".encode()
    kind = b"application/json" if as_json else b"text/plain; charset=utf-8"
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *HEADERS, *more]})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})


async def _redirect(scope: Scope, send: Send, cookie: _Header) -> None:
    """Redirect to the page without the token, which then stays in no history."""
    query = [(k, v) for k, v in parse_qsl(_text(scope["query_string"]), keep_blank_values=True) if k != "token"]
    path = "/" + quote(scope["path"].lstrip("/\\"))  # never "//host", which would be another machine
    target = path + (f"?{urlencode(query)}" if query else "")
    headers = [(b"location", target.encode()), (b"content-length", b"0"), (b"cache-control", b"no-store"), cookie]
    await send({"type": "http.response.start", "status": 303, "headers": [*headers, *HEADERS]})
    await send({"type": "http.response.body", "body": b""})


def _headers(scope: Scope) -> dict[str, list[str]]:
    headers: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        headers.setdefault(_text(name).lower(), []).append(_text(value))
    return headers


def _text(raw: bytes) -> str:
    return raw.decode("latin-1")


def _morsels(header: str) -> Mapping[str, Any]:
    try:
        return cookies.SimpleCookie(header)
    except cookies.CookieError:
        return {}


def _equal(given: str, expected: str) -> bool:
    """In a time that says nothing of where they differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
