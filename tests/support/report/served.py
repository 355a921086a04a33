"""A live page that runs: its server in a thread of this process, the runs that it is looked at with, and how to look.

`conftest.py` brings the fixtures `runs_folder` and `site` in.
"""

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plimsoll.runs import RunWriter, Scalars
from tests.support.diagnosis.faults import QUIET, A, falling
from tests.support.diagnosis.stories import Story, constant, make_story, of_layer
from tests.support.patience import HANG_SECONDS

# One layer's gradients are flushed to zero; the loss scale collapses; nothing is wrong.
LOW = make_story(samples=20, gradient_std=of_layer(A, constant(2.0**-34), QUIET))
COLLAPSED = make_story(samples=20, scale=falling(50, 8))
HEALTHY = make_story(samples=20)
WIDE = make_story(samples=6, scale=lambda step: None, gradient_fmt="fp32", activation_fmt="fp32")
LAYER = f"{A}.weight"  # the one that LOW flushes


@dataclass(frozen=True, kw_only=True)
class Served:
    """The page's address (without a slash at its end), its port, the application that answers, and who is connected."""

    url: str
    port: int
    app: Any
    connections: Any


@contextlib.contextmanager
def served(folder: Path, *, port: int = 0, poll_seconds: float = 0.3) -> Iterator[Served]:
    """The live page of a folder, until the end of the block."""
    from plimsoll.report.live.server.app import app
    from plimsoll.report.live.server.uvicorn_loop import PageServer

    listener = _bound(port)
    listener.listen(64)
    port = listener.getsockname()[1]
    made = app(folder, hosts=(f"127.0.0.1:{port}",), poll_seconds=poll_seconds)
    server = PageServer(made)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="served", daemon=True)
    thread.start()
    try:
        yield Served(url=f"http://127.0.0.1:{port}", port=port, app=made, connections=server.server_state.connections)
    finally:
        made.close()  # ends the streams, for which the server would wait
        server.should_exit = True
        thread.join(HANG_SECONDS)
        listener.close()
        assert not thread.is_alive()


@contextlib.contextmanager
def kept(port: int) -> Iterator[None]:
    """Keeps a served port from other programs, also while no server is there, until the end of the block."""
    with _bound(port):
        yield


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    for option in ("SO_REUSEADDR", "SO_REUSEPORT"):
        if hasattr(socket, option):
            bound.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
    bound.bind(("127.0.0.1", port))
    return bound


def write_steps(writer: RunWriter, story: Story, first: int, last: int) -> None:
    """Some of a story's steps, as a training that goes on writes them."""
    for step in range(first, last + 1):
        scale = story.scale(step) or 1.0
        writer.write(Scalars(step=step, values={"loss": story.loss(step), "scale": scale, "nonfinite": 0.0}))
        if step % story.every == 0:
            story._sample(writer, step, scale)
    assert writer.flush()


@pytest.fixture(scope="session")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs to read: of each kind one, one more deeper down, and one that cannot be read."""
    root = tmp_path_factory.mktemp("runs")
    LOW.write(root / "low")
    COLLAPSED.write(root / "collapsed")
    HEALTHY.write(root / "healthy")
    shutil.copytree(root / "healthy", root / "sweep" / "seed 1")
    (root / "broken").mkdir()
    (root / "broken" / "run.json").write_text("{no json")
    return root


def write_sweep(root: Path) -> None:
    """Write three runs that differ in their settings. Each has scalars that a training logs, and two have tensors."""
    for place, rate in enumerate((0.1, 0.01, 0.001)):
        settings = {"lr": rate, "batch": 32, "optimizer": {"name": "SGD" if place == 0 else "AdamW"}}
        with RunWriter(root / f"rate {place}", settings=settings, flush_seconds=600) as writer:
            if place < 2:
                write_steps(writer, WIDE, 0, 29)
            for step in range(30):
                values = {"lr": rate * 0.9**step, "acc": (step + place) / 40, "epoch": step / 10}
                writer.write(Scalars(step=step, values=values))


@pytest.fixture(scope="module")
def site(runs_folder: Path) -> Iterator[Served]:
    """Their live page."""
    with served(runs_folder) as found:
        yield found


def at(page: Any, site: Served, route: str) -> Any:
    """The page, at an address."""
    page.goto(f"{site.url}/{route}")
    return page


def hash_of(page: Any) -> str:
    """Where the page is."""
    return page.evaluate("location.hash")


def expect(found: Any) -> Any:
    """Playwright's assertions, which wait."""
    from playwright.sync_api import expect as expected

    expected.set_options(timeout=1000 * HANG_SECONDS)
    return expected(found)


def drawn(page: Any, figure: str) -> Any:
    """A figure, once it is in view and has been drawn."""
    found = page.locator(figure)
    found.scroll_into_view_if_needed()
    expect(found.locator(".main-svg").first).to_be_visible()
    return found


def wait_for_title(figure: Any, text: str) -> None:
    """Wait until the title of a figure contains a text.

    The figure is kept in view: one out of view is not drawn again, and figures above it may grow and push it away.
    """
    figure.page.wait_for_function(
        """([figure, text]) => {
            figure.scrollIntoView({ block: "nearest" });
            return figure.querySelector(".picture-title").textContent.toLowerCase().includes(text.toLowerCase());
        }""",
        arg=[figure.element_handle(), text],
        timeout=1000 * HANG_SECONDS,
    )
