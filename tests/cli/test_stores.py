"""Commands read runs by URI, from any filesystem, and write to this machine only."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec import AbstractFileSystem
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.cli.paths import label_of
from plimsoll.runs.storage.location import without_secrets
from tests.support.cases import each
from tests.support.diagnosis.faults import falling
from tests.support.diagnosis.stories import constant, make_story


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    story = make_story(samples=20, scale=falling(60, 14), gradient_std=constant(2.0**-19))
    return story.write(tmp_path_factory.mktemp("here") / "exp1")


@pytest.fixture
def store(local: Path) -> Iterator[str]:
    """The address of the same run in an object store in memory."""
    memory = fsspec.filesystem("memory")
    for path in local.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            memory.pipe_file(f"/bucket/exp1/{path.relative_to(local).as_posix()}", path.read_bytes())
    yield "memory://bucket/exp1"
    memory.rm("/bucket", recursive=True)


READERS = [
    ["check", "{run}"],
    ["check", "{run}", "--json"],
    ["whatif", "{run}", "--format", "e5m2", "--json"],
    ["plan", "{run}", "--target", "bf16", "--include", "blocks.*"],
    ["report", "{run}", "--json"],
    ["diff", "{run}", "{run}", "--json"],
]


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_a_command_says_of_a_uri_what_it_says_of_the_folder(command: list[str], local: Path, store: str) -> None:
    def of(address: object) -> Result:
        return run(*(part.replace("{run}", str(address)) for part in command))

    here, there, by_file = of(local), of(store), of(local.as_uri())
    assert here.exit_code in (0, 1) and here.stdout, here.stderr

    def neutral(result: Result) -> tuple[int, str]:
        make_story = "".join(result.stdout.split())  # a table wraps names of other lengths elsewhere
        for name in (store, local.as_uri(), str(local), "/bucket/exp1"):
            make_story = make_story.replace("".join(name.split()), "RUN")
        return result.exit_code, make_story

    assert neutral(there) == neutral(here)
    assert neutral(by_file) == neutral(here)


def test_two_runs_of_which_one_is_elsewhere_are_compared(local: Path, store: str) -> None:
    result = run("diff", local, store)
    assert result.exit_code == 0 and "They do not diverge" in result.stdout
    assert result.stdout.splitlines()[:2] == [f"A  {local}", "B  memory://bucket/exp1"]


def test_a_plan_from_elsewhere_is_written_here_and_held_against_it(local: Path, store: str, tmp_path: Path) -> None:
    made = run("plan", store, "--target", "bf16", "--include", "blocks.*", "-o", tmp_path / "plan.toml")
    assert made.exit_code == 0 and (tmp_path / "plan.toml").is_file(), made.stderr
    here, there = (run("plan", place, "--check", tmp_path / "plan.toml") for place in (local, store))
    assert (there.exit_code, there.stdout) == (here.exit_code, here.stdout) and here.exit_code in (0, 1)


def test_the_page_of_a_run_elsewhere_bears_its_name(store: str, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="figures need the extra report: pip install '.[report]'")
    assert run("report", store, "-o", tmp_path / "page.html").exit_code == 0
    assert "<title>exp1" in (tmp_path / "page.html").read_text("utf-8")


class Deaf(AbstractFileSystem):
    """A store that nobody reaches: its library raises what is no OSError."""

    def ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
        raise TimeoutError(f"no route to {path}")


class Mute(AbstractFileSystem):
    """A store that cannot even be spoken to."""

    def __init__(self, **_: object) -> None:
        raise KeyError("no key")


@pytest.fixture
def odd_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemes of the two, and one whose package is missing."""
    registry = sys.modules["fsspec.registry"]._registry
    monkeypatch.setitem(registry, "deaf", Deaf)
    monkeypatch.setitem(registry, "mute", Mute)
    monkeypatch.setitem(sys.modules, "adlfs", None)


NOTHING = "memory://nothing/here"
NO_RUN = "No Plimsoll run in memory://nothing/here. Name the folder .*; plimsoll serve lists the runs of a store."
REFUSED = [
    (["check"], NOTHING, NO_RUN),
    (["whatif", "--format", "fp16"], NOTHING, NO_RUN),
    (["plan", "--target", "bf16"], NOTHING, NO_RUN),
    (["report"], NOTHING, NO_RUN),
    (["diff", "."], NOTHING, NO_RUN),
    (
        ["serve", "--port", "0"],
        NOTHING,
        f"serve: expected a folder that runs were copied to; got {NOTHING}, where nothing is",
    ),
    (
        ["check"],
        "foo://b/a",
        "a URI that pyarrow knows .* or fsspec does; got foo://b/a: Protocol not known: foo. Corr",
    ),
    (["check"], "s3://b/a?colour=red", "a URI that pyarrow knows .*; got s3://b/a: Unexpected query parameter"),
    (
        ["check"],
        "deaf://b/a",
        "storage that answers; got TimeoutError for the folder in deaf://b/a: no route to b/a. Look",
    ),
    (["serve", "--port", "0"], "deaf://b/a", "storage that answers; got TimeoutError for the folder in deaf://b/a"),
    (["check"], "mute://b/a", "storage that answers; got KeyError for mute://b/a: 'no key'. Look at the address"),
    (["check"], "az://b/a", r"expected the package that opens az://; got none \(.*\). Install it: pip install adlfs$"),
]


@pytest.mark.usefixtures("odd_schemes")
@pytest.mark.parametrize(("command", "address", "message"), REFUSED)
def test_what_cannot_be_read_exits_with_2_and_says_why(
    command: list[str], address: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *rest = command
    result = run(name, address, *rest)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert re.search(message, result.stderr), result.stderr
    assert list(tmp_path.iterdir()) == []


FILE = "expected {} to name a file of this machine; got the URI {}. Write to {} and copy it"
FOLDER = (
    "expected --output to name a folder of this machine; got the URI s3://b/{}. Write to {} and copy it: aws s3 sync"
)
WRITERS = [
    (["plan", "{run}", "--target", "bf16", "-o", "s3://b/plan.toml"],
     f"plan: {FILE.format('--output', 's3://b/plan.toml', 'plan.toml')}: aws s3 cp plan.toml s3://b/plan.toml."),
    (["plan", "{run}", "--check", "gs://b/plan.toml"],
     "plan: expected --check to name a file of this machine; got the URI gs://b/plan.toml. Copy it here first."),
    (["report", "{run}", "-o", "gs://b/r.html"],
     f"report: {FILE.format('-o', 'gs://b/r.html', 'report.html')}: gcloud storage cp report.html gs://b/r.html."),
    (["report", "{run}", "-o", "sftp://me:word@box/r.md"],
     f"report: {FILE.format('-o', 'sftp://me@box/r.md', 'report.html')} there."),
    (["run", "--output", "s3://b/exp1", "{script}"],
     f"run: {FOLDER.format('exp1', 'runs/exp1')} runs/exp1 s3://b/exp1, again and again while it grows (docs/how-to"),
    (["lab", "formats", "--output", "s3://b/lab"], f"lab: {FOLDER.format('lab', 'lab-formats')} lab-formats s3://b/lab"),
    (["lab", "--list", "--output", "s3://b/lab"], f"lab: {FOLDER.format('lab', 'lab-all')} lab-all s3://b/lab"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "message"), WRITERS, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_nothing_is_written_to_a_uri(
    command: list[str], message: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(99)")
    result = run(*(part.replace("{run}", str(local)).replace("{script}", str(script)) for part in command))
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""
    assert list(tmp_path.iterdir()) == [script]


@each(
    ("uri", "shown"),
    [
        ("s3://AKIA:secret@bucket/exp1?endpoint_override=box:9000&token=t", "s3://bucket/exp1"),
        ("s3://AKIA@bucket/a@b", "s3://bucket/a@b"),
        ("abfs://files:word@account.dfs.core.windows.net/x#f", "abfs://files@account.dfs.core.windows.net/x"),
        ("sftp://me:p@ss@box:22/runs", "sftp://me@box:22/runs"),
        ("memory://bucket/exp1", "memory://bucket/exp1"),
        ("gs://bucket", "gs://bucket"),
    ],
)
def test_no_message_has_what_is_secret_in_a_uri(uri: str, shown: str) -> None:
    assert without_secrets(uri) == label_of(uri) == shown
    bad = run("check", f"foo{uri[uri.index('://') :]}")
    assert bad.exit_code == 2 and not any(word in bad.output for word in ("secret", "word@", "p@ss", "token"))


def test_what_a_run_elsewhere_is_called_has_no_secret_in_it(store: str) -> None:
    data = json.loads(run("check", store, "--json").stdout)
    assert data["run"] == store
    for command in (["check"], ["serve", "--port", "0"]):
        said_of = run(*command, "memory://me:word@box/runs").stderr
        assert "memory://me@box/runs" in said_of and "word" not in said_of
