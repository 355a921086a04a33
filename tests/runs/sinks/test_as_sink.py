import functools
import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import pytest

from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import EXTRAS, install_line
from plimsoll.runs import RunWriter, Scalars
from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks import MLflow, TensorBoard, WandB, as_sink, resolve
from plimsoll.runs.writing.sink_feed import SinkRunner
from tests.support import processes
from tests.support.cases import each
from tests.support.runs.sinks import Recorder, record

# Asked without importing: MLflow alone takes seconds.
TRACKERS = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
MISSING = [name for name in TRACKERS if importlib.util.find_spec(name) is None]
needs_trackers = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def through(given: object, *records: StepRecord) -> SinkRunner:
    """The runner, closed, after these records."""
    runner = SinkRunner(as_sink(given))
    runner.open(Path(), {})
    for one in records:
        runner.put(one)
    runner.flush(60)
    runner.close(60)
    assert runner.failure is None
    return runner


def test_a_function_is_called_with_each_record() -> None:
    seen: list[StepRecord] = []

    def note(record: StepRecord) -> None:
        seen.append(record)

    given = [record(1), record(2)]
    assert through(note, *given).name == "note"
    assert seen == given


def test_so_is_what_can_be_called_with_one_argument() -> None:
    seen: list[object] = []
    through(functools.partial(lambda prefix, record: seen.append((prefix, record.step)), "a"), record(1))
    through(seen.append, record(2))
    assert seen[0] == ("a", 1)
    assert len(seen) == 2


def test_an_object_with_all_methods_is_itself() -> None:
    sink = Recorder()
    assert as_sink(sink) is sink


def test_methods_but_put_may_be_missing() -> None:
    class Putting:
        def __init__(self) -> None:
            self.steps: list[int] = []
            self.closed = False

        def put(self, record: StepRecord) -> None:
            self.steps.append(record.step)

        def close(self) -> None:
            self.closed = True

    sink = Putting()
    assert through(sink, record(4)).name == "Putting"
    assert (sink.steps, sink.closed) == ([4], True)


@needs_trackers
@each(("name", "sink"), TRACKERS.items())
def test_names_of_our_own(name: str, sink: type) -> None:
    assert type(as_sink(name)) is sink


def test_choices_derive_from_what_the_classes_declare() -> None:
    assert {sink.name: sink for sink in TRACKERS.values()} == dict(resolve.TRACKERS)
    assert all(sink.extra in EXTRAS for sink in TRACKERS.values())


def packaged(folder: Path, package: str, entry: str, source: str = "") -> None:
    """An installed package with one entry point: metadata as an installer writes it, and a module."""
    metadata = folder / f"{package}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{resolve.GROUP}]\n{entry}\n")
    if source:
        (folder / f"{package}.py").write_text(source)


def test_the_packaged_sink_of_the_docs_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "how-to" / "sinks.md").read_text("utf-8")
    section = guide.partition("## A sink in a package")[2].partition("\n## ")[0]
    source, declared = (re.findall(rf"```{kind}\n(.*?)```", section, re.DOTALL)[0] for kind in ("python", "toml"))
    ((name, target),) = tomllib.loads(declared)["project"]["entry-points"][resolve.GROUP].items()
    packaged(tmp_path / "site", "plimsoll_jsonl", f"{name} = {target}", source)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "plimsoll_jsonl", raising=False)
    with pytest.raises(ArgumentError, match=f"'mlflow', '{name}'; got 'comet'"):
        as_sink("comet")
    assert "plimsoll_jsonl" not in sys.modules, "listing the names loads nothing"
    with RunWriter(tmp_path / "run", sinks=[as_sink(name)]) as writer:
        writer.write(Scalars(step=1, values={"loss": 0.5}))
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 0.5}\n'
    sys.modules.pop("plimsoll_jsonl")


def test_a_broken_package_is_named_when_its_sink_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged(tmp_path, "sunk", "sunk = sunk:Sunk", "raise RuntimeError('half installed')")
    packaged(tmp_path, "gone", "gone = gone_module:Gone")
    packaged(tmp_path, "own", "wandb = own:Wandb")
    for package in ("one", "two"):
        packaged(tmp_path, package, "twice = json:loads")
    monkeypatch.syspath_prepend(tmp_path)
    assert as_sink(print).sink_name == "print"  # pyright: ignore[reportAttributeAccessIssue]
    assert as_sink(sink := Recorder()) is sink
    for name, reason in {"sunk": "RuntimeError: half installed", "gone": "ModuleNotFoundError: .*gone_module"}.items():
        with pytest.raises(ArgumentError, match=f"the sink '{name}' of the package {name} to load from .*{reason}"):
            as_sink(name)
    with pytest.raises(ArgumentError, match="expected one package that offers the sink 'twice'; got one, two"):
        as_sink("twice")
    if "wandb" not in MISSING:
        assert type(as_sink("wandb")) is WandB, "a name of Plimsoll's own is not taken over"


async def _later(record: StepRecord) -> None: ...


@each(
    ("given", "message"),
    [
        ("comet", "as_sink: expected .*'tensorboard', 'wandb', 'mlflow'; got 'comet'. Choose one of these."),
        (TensorBoard, "got the class TensorBoard. Give TensorBoard()."),
        (7, "got 7 .int.. Give one of these."),
        (None, "got None .NoneType."),
        (lambda: None, "which cannot be called with one argument. Give one that can."),
        (pow, "which cannot be called with one argument"),
        (_later, "got the coroutine function .*_later.*. Give a plain one."),
    ],
)
def test_anything_else_is_refused(given: object, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        as_sink(given)


@pytest.mark.parametrize("sink", [TensorBoard, WandB, MLflow])
def test_a_missing_extra_is_said_when_the_sink_is_made(sink: type, monkeypatch: pytest.MonkeyPatch) -> None:
    package = sink.__name__.lower()
    monkeypatch.setitem(sys.modules, package, None)
    line = re.escape(install_line(package))
    with pytest.raises(MissingExtraError, match=rf"{sink.__name__}: expected the package {package}; .*: {line}$"):
        sink()


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(MissingExtraError, match="expected the package wandb"):
        WandB()


@needs_trackers
def test_nothing_is_imported_before_a_sink_is_opened() -> None:
    code = (
        "import sys; from plimsoll.runs.sinks import TensorBoard, WandB, MLflow; TensorBoard(); WandB(); MLflow();"
        "print(*{'tensorboard', 'tensorflow', 'wandb', 'mlflow'} & set(sys.modules))"
    )
    done = processes.python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "")
