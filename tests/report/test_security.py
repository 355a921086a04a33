"""Promise P9 on the live page: who may ask, what answers carry, and that no id leads out of the folder."""

import hmac
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from plimsoll.errors import RunError
from plimsoll.report.live.security import ANY_ADDRESS, HEADERS, cookie_of
from plimsoll.report.live.server.app import App, app
from plimsoll.runs import RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.stories import make_story

HOSTS = ("localhost:8642", "127.0.0.1:8642", "[::1]:8642")
TOKEN = "a token that is long enough"
PAGES = ("/", "/api/runs", "/api/runs/a", "/api/stream", "/assets/plotly.min.js")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A served folder with two runs, a secret run beside it, and links that lead to it."""
    root = tmp_path_factory.mktemp("security")
    make_story(samples=2).write(root / "served" / "a")
    make_story(samples=2).write(root / "served" / "deep" / "b c")
    make_story(samples=2).write(root / "secret")
    (root / "served" / "link").symlink_to(root / "secret")
    _a_run(root / "served" / "linked-manifest")
    (root / "served" / "linked-manifest" / "run.json").unlink()
    (root / "served" / "linked-manifest" / "run.json").symlink_to(root / "secret" / "run.json")
    _a_run(root / "served" / "linked-part")
    part = next((root / "secret" / "spectra").iterdir())
    (root / "served" / "linked-part" / "spectra").mkdir(exist_ok=True)
    (root / "served" / "linked-part" / "spectra" / part.name).symlink_to(part)
    return root / "served"


def _a_run(path: Path) -> None:
    with RunWriter(path) as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[App]:
    made = app(folder, hosts=HOSTS)
    yield made
    made.close()


def client(made: App, base: str = "http://localhost:8642", **more: Any) -> TestClient:
    return TestClient(made, base_url=base, follow_redirects=False, **more)


# -- whom the page answers


@each("host", [*HOSTS, "LOCALHOST:8642"])
def test_the_page_goes_by_its_own_names(page: App, host: str) -> None:
    assert client(page).get("/api/runs", headers={"host": host}).status_code == 200


@each(
    "host",
    ["evil.example", "evil.example:8642", "localhost", "localhost:9999", "localhost.evil.example:8642", "", ":8642",
     "127.0.0.1.evil.example:8642", "localhost:8642@evil.example", "10.0.0.1:8642", "[::1]", "127.0.0.2:8642"],
)  # fmt: skip
@each("path", ["/", "/api/runs"])
def test_a_foreign_name_is_refused(page: App, host: str, path: str) -> None:
    answer = client(page).get(path, headers={"host": host})
    assert answer.status_code == 403
    assert "--allow-host" in answer.text
    assert path == "/" or list(answer.json()) == ["error"]


def test_two_host_headers_are_refused(page: App) -> None:
    for hosts in ([], [b"localhost:8642", b"localhost:8642"]):
        assert _status(page, [(b"host", host) for host in hosts]) == 403


def test_any_address_is_no_name(folder: Path) -> None:
    asked = client(app(folder, hosts=(ANY_ADDRESS, "box:8642")))
    for host, status in (("10.0.0.7:8642", 200), ("[fe80::1]:8642", 200), ("box:8642", 200), ("evil.example:80", 403)):
        assert asked.get("/api/runs", headers={"host": host}).status_code == status


@each("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_reading_is_allowed(page: App, method: str) -> None:
    answer = client(page).request(method, "/api/runs")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


@each("path", PAGES)
def test_head_has_the_headers_and_no_body(page: App, path: str) -> None:
    answer = client(page).head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_other_sites_cannot_make_the_server_work(page: App) -> None:
    crossing = {"sec-fetch-site": "cross-site"}
    assert client(page).get("/api/runs", headers=crossing).status_code == 403
    assert client(page).get("/", headers=crossing).status_code == 200  # a link to the page


def test_web_sockets_are_closed(page: App) -> None:
    with pytest.raises(WebSocketDisconnect), client(page).websocket_connect("/api/stream"):
        pass


# -- the token


@pytest.fixture
def guarded(folder: Path) -> App:
    return app(folder, TOKEN, HOSTS)


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"},
                                   {"cookie": f"{cookie_of(TOKEN)[0]}=wrong"}, {"cookie": f"plimsoll={TOKEN}"},
                                   {"cookie": '"; =;;'}])  # fmt: skip
def test_without_the_token_nothing_is_told(guarded: App, path: str, given: dict[str, str]) -> None:
    answer = client(guarded).get(path, headers=given)
    assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert "Open the whole address that plimsoll serve printed" in answer.text
    assert "set-cookie" not in answer.headers


def test_the_bearer_may_ask(guarded: App) -> None:
    assert client(guarded).get("/api/runs", headers={"authorization": f"bearer {TOKEN}"}).status_code == 200


def test_a_token_in_the_address_becomes_a_cookie(guarded: App) -> None:
    asked = client(guarded)
    answer = asked.get("/", params={"token": TOKEN, "view": "a b"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/?view=a+b")
    told_cookie = answer.headers["set-cookie"]
    assert all(word in told_cookie for word in ("HttpOnly", "SameSite=Strict", "Path=/"))
    assert TOKEN not in told_cookie
    assert asked.get("/api/runs").status_code == 200


def test_a_wrong_token_in_the_address_gives_no_cookie(guarded: App) -> None:
    answer = client(guarded).get("/", params={"token": TOKEN[:-1]})
    assert answer.status_code == 401 and "set-cookie" not in answer.headers


def test_the_redirect_leads_to_no_other_machine(guarded: App) -> None:
    scope_path = "//evil.example/x"
    location = dict(_start(guarded, [(b"host", b"localhost:8642")], scope_path, f"token={TOKEN}".encode())["headers"])
    assert location[b"location"] == b"/evil.example/x"


def test_tokens_are_compared_in_constant_time(guarded: App, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []
    whole = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        seen.append(a)
        return whole(a, b)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert client(guarded).get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert seen == [b"wrong"]


# -- what answers carry


@each(
    ("path", "headers", "status"),
    [("/", {}, 200), ("/api/runs", {}, 200), ("/nothing", {}, 404), ("/api/runs/none", {}, 404),
     ("/", {"host": "evil.example"}, 403), ("/api/runs/a/whatif", {}, 422)],
)  # fmt: skip
def test_every_answer_is_confined(page: App, path: str, headers: dict[str, str], status: int) -> None:
    answer = client(page).get(path, headers={"origin": "https://evil.example", **headers})
    assert answer.status_code == status
    for name, value in HEADERS:
        assert answer.headers[name.decode()] == value.decode()
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "server" not in answer.headers


def test_the_policy_allows_no_foreign_and_no_inline_script() -> None:
    policy = dict(HEADERS)[b"content-security-policy"].decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["script-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["object-src"] == rules["base-uri"] == "'none'"


def test_the_page_has_no_inline_script() -> None:
    from plimsoll.report.page.assets import assets

    markup = assets()[1]["index.html"].body.decode()
    assert "<script>" not in markup and " onload=" not in markup and " onclick=" not in markup
    assert "http://" not in markup and "https://" not in markup


def test_a_defect_tells_nothing_of_itself(page: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bytes:
        raise RuntimeError("the secret")

    monkeypatch.setattr(page.answers, "runs", broken)
    answer = client(page, raise_server_exceptions=False).get("/api/runs")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"


# -- ids


@each(
    "quoted",
    ["..", "..%2Fsecret", "%2e%2e%2fsecret", "..%5csecret", "a%2F..%2F..%2Fsecret", "%2Ftmp", "%2Fetc%2Fpasswd",
     "a%00", "%00", "link", "deep", "deep%252Fb%20c", "a%2F%2F", "%2Fa", ".%2Fa", "a%2Fspectra", "", "%FF%FE",
     "a" * 9000, "C%3A%5Csecret", "~", "a%2Frun.json", "__proto__"],
)  # fmt: skip
def test_no_id_leads_anywhere_else(page: App, quoted: str, folder: Path) -> None:
    asked = client(page)
    for path in (f"/api/runs/{quoted}", f"/api/runs/{quoted}/figure/record", f"/api/runs/{quoted}/whatif?format=fp16",
                 f"/api/compare?a={quoted}&b=a"):  # fmt: skip
        answer = asked.get(path)
        assert answer.status_code == (422 if quoted == "" and "compare" in path else 404), path
        assert str(folder.parent) not in answer.text


@each("raw", ["/api/runs/../../secret", "/api/runs/a/../../secret", "//etc/passwd", "/assets/../x"])
def test_paths_that_no_browser_sends_lead_nowhere(page: App, raw: str) -> None:
    assert _start(page, [(b"host", b"localhost:8642")], raw)["status"] == 404


def test_a_run_deeper_down_goes_by_its_whole_path(page: App) -> None:
    answer = client(page).get("/api/runs/deep%2Fb%20c")
    assert answer.status_code == 200 and answer.json()["id"] == "deep/b c"
    assert client(page).get("/api/runs/deep/b%20c").status_code == 404


@pytest.mark.parametrize("run_id", ["linked-manifest", "linked-part"])
def test_links_out_of_the_folder_are_not_followed(page: App, run_id: str, folder: Path) -> None:
    for path in (f"/api/runs/{run_id}", f"/api/runs/{run_id}/figure/record"):
        answer = client(page).get(path)
        assert answer.status_code == 409 and "a link out of it" in answer.json()["error"]
        assert str(folder.parent) not in answer.text


def test_the_folder_itself_may_be_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(folder)
    assert client(app(tmp_path / "runs", hosts=HOSTS)).get("/api/runs/a").status_code == 200


def test_errors_and_answers_say_nothing_of_where_the_folder_lies(page: App, folder: Path) -> None:
    bad = folder / "newer"
    bad.mkdir(exist_ok=True)
    (bad / "run.json").write_text('{"schema": 99}')
    asked = client(page)
    for path in ("/api/runs", "/api/runs/a", "/api/runs/newer", "/api/compare?a=a&b=newer", "/api/runs/a/figure/x"):
        assert str(folder.parent) not in asked.get(path).text


def test_paths_in_messages_begin_at_the_folder(page: App, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> bytes:
        raise RunError(f"Run: expected parts; got none in {folder}/a/spectra, {folder}.")

    monkeypatch.setattr(page.answers, "run", gone)
    assert client(page).get("/api/runs/a").json()["error"] == "Run: expected parts; got none in a/spectra, .."


def test_nothing_is_unpickled(page: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> object:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    asked = client(page)
    for path in ("/api/runs", "/api/runs/a", "/api/runs/a/figure/loss_and_scale", "/api/runs/a/whatif?format=fp16"):
        assert asked.get(path).status_code == 200


def _start(
    made: App, headers: list[tuple[bytes, bytes]], path: str = "/api/runs", query: bytes = b""
) -> dict[str, Any]:
    """The beginning of an answer to a request as no client would send it."""
    import asyncio

    sent: list[dict[str, Any]] = []

    async def ask() -> None:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(dict(message))

        scope = {"type": "http", "method": "GET", "path": path, "raw_path": os.fsencode(path), "query_string": query,
                 "headers": headers, "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
                 "server": ("localhost", 8642), "client": ("127.0.0.1", 1), "root_path": ""}  # fmt: skip
        await made(scope, receive, send)

    asyncio.run(ask())
    return sent[0]


def _status(made: App, headers: list[tuple[bytes, bytes]]) -> int:
    return _start(made, headers)["status"]
