"""A real Chromium for tests of pages: where it is found, and a page that fails its test on anything it should not do.

A `conftest.py` (as that of tests/report) brings the fixtures in; a test module marks itself with
``pytestmark = needs_browser``. `page` is a playwright page: when its test ends, a console error, an uncaught exception,
a dialog (which is what injected scripts open) or a request to anywhere but this machine fails the test. `seen` is the
record of these, in which a test may look for itself, or allow an error that it provokes: ``seen.expects("404")``.

While the browser is open an event loop of playwright's runs in this thread: no `asyncio.run` in the same module.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import HANG_SECONDS

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
ARGUMENTS = [
    "--no-sandbox",  # in containers tests run as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
    # No name but this machine's is looked up, so that nothing can leave it even where a test does not watch.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost, EXCLUDE 127.0.0.1",
]
HERE = ("http://127.0.0.1:", "http://localhost:", "file:", "data:", "blob:", "about:")


def find_chromium() -> str | None:
    """The path of an installed Chromium, or None. CHROMIUM names another, or is `none`. None is ever downloaded."""
    if (chosen := os.environ.get("CHROMIUM")) is not None:
        return None if chosen == "none" else chosen
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(find_chromium() is None, reason="install Chromium (apt-get install chromium)")


@dataclass
class Seen:
    """What a page did: console errors and warnings, uncaught exceptions, dialogs, and requests by address."""

    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)

    def expects(self, pattern: str) -> None:
        """Errors that match this are provoked by the test, and fail nothing."""
        self.expected.append(pattern)

    def faults(self, allowed: tuple[str, ...] = HERE) -> list[str]:
        """All that a page should not do."""
        errors = [e for e in self.errors if not any(re.search(pattern, e) for pattern in self.expected)]
        left = [f"request to {url[:200]}" for url in self.requests if not url.startswith(allowed)]
        return errors + [f"dialog: {text}" for text in self.dialogs] + left


@contextmanager
def open_page(browser: Any, *, allowed: tuple[str, ...] = HERE, **options: Any) -> Iterator[tuple[Any, Seen]]:
    """A page of its own context (``viewport=``, ``color_scheme=``, ...) and what it does; faults fail at its end."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * HANG_SECONDS)
    try:
        page, seen = context.new_page(), Seen()
        page.on("console", lambda m: seen.errors.append(f"console {m.type}: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: seen.errors.append(f"uncaught: {error}"))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
        yield page, seen
        faults = seen.faults(allowed)
        assert not faults, "\n".join(faults)
    finally:
        context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One headless Chromium for the module."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = find_chromium()
        opened = playwright.chromium.launch(
            executable_path=path, headless=True, args=ARGUMENTS, timeout=1000 * HANG_SECONDS
        )
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[tuple[Any, Seen]]:
    """A page and what it does."""
    with open_page(browser, viewport={"width": 1280, "height": 900}) as both:
        yield both


@pytest.fixture
def page(opened: tuple[Any, Seen]) -> Any:
    """A page, 1280 pixels wide, that fails the test on what it should not do."""
    return opened[0]


@pytest.fixture
def seen(opened: tuple[Any, Seen]) -> Seen:
    """What `page` has done so far."""
    return opened[1]


def address(path: Path) -> str:
    """A file as an address."""
    return path.absolute().as_uri()
