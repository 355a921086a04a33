"""The reader: names, steps, following a live writer, and folders in which something is wrong."""

import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plimsoll import report
from plimsoll.diagnosis import View
from plimsoll.errors import ArgumentError, NotRecordedError, RunError
from plimsoll.runs import Event, Run, RunWriter, Scalars
from plimsoll.runs.storage.parts import Part
from tests.runs.test_compact import many_parts, parts
from tests.support.cases import each
from tests.support.runs import making

NAMES = ("head:output[0]", "head:output0", "blocks.0.w", "blocks.1.w", "blocks.*", "blocks.10.w")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Six steps of two collections."""
    with RunWriter(tmp_path, settings={"lr": 0.1, "layers": [1, 2]}) as writer:
        for step in range(0, 60, 10):
            for collection in ("gradients", "activations"):
                x = torch.full((step + 1,), 2.0)
                writer.write(making.batch(writer, step, {(collection, n): x for n in NAMES}, last=collection[0] == "a"))
            writer.write(Scalars(step=step, values={"loss": 1.0, "loss_scale": 2.0}))
    return tmp_path


def test_what_there_is(path: Path) -> None:
    run = Run(str(path))
    assert run.steps == [0, 10, 20, 30, 40, 50] and run.ranks == [0] and run.world_size == 1
    assert run.tensors == {"gradients": NAMES, "activations": NAMES}
    assert run.scalar_names == ("loss", "loss_scale")
    assert run.settings == {"lr": 0.1, "layers": [1, 2]} and run.closed and run.dropped == {} and run.problems == []
    assert repr(run) == f"<Run: {path}, 12 series, steps 0 to 50, 1 of 1 ranks, closed>"
    assert set(run.manifest["versions"]) == {"plimsoll", "python", "torch", "numpy", "pyarrow"}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("head:output[0]", ["head:output[0]"]),  # itself, not the glob that matches head:output0
        ("blocks.*", ["blocks.*"]),
        ("blocks.?.w", ["blocks.0.w", "blocks.1.w"]),
        ("blocks.*.w", ["blocks.0.w", "blocks.1.w", "blocks.10.w"]),
        ("*output*", ["head:output[0]", "head:output0"]),
        ("BLOCKS*", []),
        (None, list(NAMES)),
    ],
)
def test_exact_names_match_first_then_globs(path: Path, pattern: str | None, expected: list[str]) -> None:
    run = Run(path)
    assert sorted({n for _, _, n, _ in run.spectra("gradients", pattern)}) == sorted(expected)
    assert sorted(set(run.table("gradients", pattern)["name"].to_pylist())) == sorted(expected)


def test_collections_may_be_globs_too(path: Path) -> None:
    assert {c for _, c, _, _ in Run(path).spectra("*", "blocks.0.w")} == {"gradients", "activations"}
    assert {c for _, c, _, _ in Run(path).spectra("act*", "blocks.0.w")} == {"activations"}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, [0, 10, 20, 30, 40, 50]),
        (slice(10, 40), [10, 20, 30]),
        (slice(15, None), [20, 30, 40, 50]),
        (slice(None, 11), [0, 10]),
        (slice(10, None, 20), [10, 30, 50]),
        (slice(None, None, 20), [0, 20, 40]),
        (slice(60, 90), []),
        (slice(np.int64(10), np.int32(40), np.int8(10)), [10, 20, 30]),
    ],
)
def test_steps_are_sliced_by_their_numbers(path: Path, steps: slice | None, expected: list[int]) -> None:
    run = Run(path)
    found = [(s, x.count) for s, _, _, x in run.spectra("gradients", "blocks.0.w", steps)]
    assert found == [(s, s + 1) for s in expected]
    assert run.table("gradients", "blocks.0.w", steps)["step"].to_pylist() == expected


@pytest.mark.parametrize("steps", [slice(0, 10, 0), slice(50, 0, -1), slice(0.5, 2), slice("a")])
def test_slices_that_mean_nothing_are_refused(path: Path, steps: slice) -> None:
    with pytest.raises(
        ArgumentError, match=r"Run.spectra: expected steps to be a slice of step numbers, ascending; got"
    ):
        next(Run(path).spectra(steps=steps))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda run: run.spectrum("gradient", "w", 0),
            r"Run.spectrum: expected a collection .*got 'gradient'\. The nearest are 'gradients'",
        ),
        (
            lambda run: run.spectrum("gradients", "blocks.2.w", 0),
            r"expected a name in 'gradients' that was recorded; got 'blocks.2.w'\. The nearest are 'blocks\.",
        ),
        (
            lambda run: run.spectrum("gradients", "blocks.0.w", 24),
            r"expected a step at which gradients 'blocks.0.w' was recorded; got 24\. The nearest are 10, 20, 30\.",
        ),
        (lambda run: run.series("weights", "w", "std"), r"Run.series: expected a collection"),
        (lambda run: run.series("gradients", "zzz", "std"), r"Run.series: expected a name in 'gradients'"),
        (
            lambda run: run.scalars("los"),
            r"Run.scalars: expected a scalar that was recorded; got 'los'\. The nearest are 'loss'",
        ),
    ],
)
def test_what_was_not_recorded_is_said_with_the_nearest_names(
    path: Path, ask: Callable[[Run], object], message: str
) -> None:
    with pytest.raises(NotRecordedError, match=message):
        ask(Run(path))


def test_a_statistic_that_is_none_is_refused(path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"Run.series: expected a statistic among .*zero_fraction.*; got 'amax'\."):
        Run(path).series("gradients", "blocks.0.w", "amax")


def test_an_empty_run_has_nothing_and_says_so(tmp_path: Path) -> None:
    RunWriter(tmp_path).close()
    run = Run(tmp_path)
    assert run.steps == [] and run.tensors == {} and run.scalar_names == () and run.events() == []
    assert list(run.spectra()) == [] and len(run.table()) == 0 and run.closed
    with pytest.raises(NotRecordedError, match=r"got 'loss'\. Nothing of this kind was recorded\."):
        run.scalars("loss")


def test_a_series_whose_steps_were_never_written_is_empty(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.series("weights", "w", format="fp32")
    run = Run(tmp_path)
    assert run.tensors == {"weights": ("w",)}
    assert [column.tolist() for column in run.series("weights", "w", "std")] == [[], []]
    with pytest.raises(NotRecordedError, match=r"got 0\. The nearest are none\."):
        run.spectrum("weights", "w", 0)


@each("step", [1.5, 9.5, True, None, "10", float("nan")])
def test_a_step_that_is_no_whole_number_has_no_spectrum(path: Path, step: object) -> None:
    """1.5 was answered with the spectrum of the next step."""
    with pytest.raises(ArgumentError, match=r"Run.spectrum: expected step to be an integer; got step="):
        Run(path).spectrum("gradients", "blocks.0.w", step)
    assert Run(path).spectrum("gradients", "blocks.0.w", np.int64(10)).count == 11


@each("name", ["", None, 3, b"run", "nul\0", "x" * 5000])
def test_what_is_no_path_is_refused_in_words(name: object) -> None:
    with pytest.raises(
        (ArgumentError, RunError), match=r"Run: expected (the path of a run's folder|a folder that can)"
    ):
        Run(name)


def test_a_list_of_a_script_s_runs_that_is_nested_too_deep_is_damage(tmp_path: Path) -> None:
    (tmp_path / "script.json").write_text('{"runs": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(RunError, match=r"script.json; got JSON that is nested deeper"):
        Run(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows makes no links without rights")
def test_a_run_that_is_read_through_a_link_has_what_is_in_memory_too(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    with RunWriter(tmp_path / "run", flush_seconds=3600) as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
        assert Run(tmp_path / "latest").scalars("loss")[0].tolist() == [0]


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_what_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"Run: expected the folder of a run; got .*, which (is no folder|holds no run)"):
        Run(tmp_path / name)


def test_a_folder_above_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "group/c", "d", "e", "f", "g", "h"):
        making.written(tmp_path / name, [1])
    (tmp_path / "notes.txt").touch()
    message = r"which holds no run itself\. Runs below it: a, b, d, e, f, g and 2 more\. Name one of them\."
    with pytest.raises(RunError, match=message):
        Run(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "spectra", "events/strange.txt"])
def test_files_that_are_no_runs_make_none(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if name == "spectra" else path.touch()
    with pytest.raises(RunError, match="which holds no run"):
        Run(tmp_path)


def test_the_runs_below_a_folder_are_found(tmp_path: Path) -> None:
    for name in ("b", "a", "group/c"):
        making.written(tmp_path / name, [1])
    RunWriter(tmp_path / "rank1", rank=1, world_size=2).close()
    (tmp_path / "notes").mkdir()
    making.written(tmp_path / "group/c/inner", [1])  # a script's second model, found late
    assert [p.relative_to(tmp_path).as_posix() for p in Run.find(tmp_path)] == [
        "a", "b", "group/c", "group/c/inner", "rank1",
    ]  # fmt: skip
    assert Run.find(tmp_path / "nowhere") == []


def test_a_large_run_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plimsoll.runs.reading import spectra

    run = Run(path)
    whole = list(run.spectra())
    assert len(whole) == 72 and [x[:3] for x in whole] == [
        (s, c, n) for c in run.tensors for n in sorted(NAMES) for s in run.steps
    ]
    for rows in (1, 5, 13):
        monkeypatch.setattr(spectra, "_ROWS", rows)
        assert sorted(x[:3] for x in run.spectra()) == sorted(x[:3] for x in whole)


def test_the_table_has_the_parts_columns(path: Path) -> None:
    from plimsoll.runs.columns.schema import SCHEMAS

    table = Run(path).table()
    assert isinstance(table, pa.Table) and table.schema.equals(SCHEMAS["spectra"]) and len(table) == 72


# -- following


def test_a_live_run_is_followed_by_reading_only_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path)
    run = Run(tmp_path)
    assert run.steps == [] and not run.closed
    read: list[str] = []
    real = run._contents._steps_in

    def counting(place: object, part: Part) -> object:
        if part not in run._contents._steps:
            read.append(part.name)
        return real(place, part)

    monkeypatch.setattr(run._contents, "_steps_in", counting)
    for step in range(5):
        making.write_steps(writer, [step], name=f"w{step}")
        assert writer.flush()
        assert run.refresh() == [step]
    assert len(read) == len(set(read)) == 5
    assert run.refresh() == []
    assert run.tensors["weights"] == ("w0", "w1", "w2", "w3", "w4")
    writer.close()
    assert run.refresh() == [] and run.closed and run.steps == [0, 1, 2, 3, 4]


def test_follow_yields_what_is_added_until_the_run_is_closed(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    making.write_steps(writer, [1, 2])
    assert writer.flush()
    found = []
    for new in Run(tmp_path).follow(poll_seconds=0.001):
        found.append(new)
        if len(found) == 1:
            making.write_steps(writer, [3])
            assert writer.flush()
        else:
            writer.close()
    assert found == [[1, 2], [3]]


def test_following_a_killed_writer_ends_after_the_timeout(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    making.write_steps(writer, [1])
    assert writer.flush()
    making.die(writer)
    assert list(Run(tmp_path).follow(poll_seconds=0.001, timeout=0.01)) == [[1]]


def test_parts_that_compaction_takes_away_under_the_reader_are_found_in_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many_parts(tmp_path)
    run = Run(tmp_path)
    RunWriter(tmp_path).close()
    assert run.series("weights", "every", "count")[0].tolist() == list(range(12)) and run.problems == []
    run = Run(tmp_path)
    shutil.move(tmp_path / "spectra" / parts(tmp_path)[0], tmp_path / "away.parquet")
    monkeypatch.setattr(run._folder, "refresh", lambda: None)
    with pytest.raises(RunError, match=r"Run: expected parts that stay long enough to be read; got 20 listings"):
        run.series("weights", "every", "count")


# -- damage


def damages() -> dict[str, Callable[[Path], object]]:
    return {
        "truncated": lambda p: p.write_bytes(p.read_bytes()[:-100]),
        "empty": lambda p: p.write_bytes(b""),
        "garbage": lambda p: p.write_bytes(b"PAR1" + b"\x07" * 500 + b"PAR1"),
        "footer": lambda p: p.write_bytes(p.read_bytes()[:-200] + b"\xff" * 192 + p.read_bytes()[-8:]),
        "another table": lambda p: pa.parquet.write_table(pa.table({"x": [1]}), p),
        "a folder": lambda p: (p.unlink(), p.mkdir()),
    }


@pytest.mark.parametrize("damage", damages())
def test_a_damaged_part_costs_that_part_and_is_named(tmp_path: Path, damage: str) -> None:
    many_parts(tmp_path)
    victim = tmp_path / "spectra" / parts(tmp_path)[5]
    damages()[damage](victim)
    run = Run(tmp_path)
    with pytest.warns(RuntimeWarning, match=rf"{victim.name}: damaged \(.*\); read without it"):
        steps = run.steps
    assert steps == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    assert len(run.problems) == 1 and victim.name in run.problems[0]
    assert run.series("weights", "every", "sum")[0].tolist() == steps  # and warns no more
    assert len(run.scalars("loss")[0]) == 12
    run.refresh()
    assert len(run.problems) == 1


def test_bytes_damaged_in_the_middle_are_noticed_or_harmless(tmp_path: Path) -> None:
    path = making.written(tmp_path / "run", range(50))
    (name,) = parts(path)
    whole = (path / "spectra" / name).read_bytes()
    generator = np.random.default_rng(0)
    noticed = 0
    for _ in range(20):
        spoiled = bytearray(whole)
        at = int(generator.integers(4, len(whole) - 8))
        spoiled[at : at + 8] = generator.bytes(8)
        (path / "spectra" / name).write_bytes(spoiled)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            run = Run(path)
            assert len(list(run.spectra())) in {0, 50} or run.problems
        noticed += bool(run.problems)
    assert noticed > 15


def test_a_damaged_merged_part_gives_way_to_what_it_was_made_of(tmp_path: Path) -> None:
    many_parts(tmp_path / "many", range(3))
    shutil.copytree(tmp_path / "many", tmp_path / "merged")
    RunWriter(tmp_path / "merged").close()
    (name,) = parts(tmp_path / "merged")
    (tmp_path / "many" / "spectra" / name).write_bytes(b"")  # a machine that lost power while it was written
    run = Run(tmp_path / "many")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert run.steps == [0, 1, 2]
    assert len(run.table()) == 6


def test_a_part_that_is_missing_costs_itself(tmp_path: Path) -> None:
    many_parts(tmp_path, range(4))
    victim = tmp_path / "spectra" / parts(tmp_path)[1]
    victim.unlink()
    with pytest.warns(RuntimeWarning, match=rf"spectra/{victim.name}: missing; read without it"):
        run = Run(tmp_path)
    assert run.steps == [0, 2, 3] and run.missing == run.problems and len(run.missing) == 1


@pytest.mark.parametrize("name", ["notes.txt", "spectra/data.parquet", "spectra/sub", "events/x.tmp"])
def test_foreign_files_are_named_and_left_alone(path: Path, name: str) -> None:
    foreign = path / name
    foreign.mkdir() if name.endswith("sub") else foreign.write_bytes(b"?")
    with pytest.warns(RuntimeWarning, match=rf"{name}: not a (part|file) of this run; left alone"):
        run = Run(path)
    assert run.steps == [0, 10, 20, 30, 40, 50] and len(run.problems) == 1
    RunWriter(path).close()
    assert foreign.exists()


def test_several_problems_are_one_warning(path: Path) -> None:
    for name in "abc":
        (path / name).touch()
    with pytest.warns(RuntimeWarning, match=r"a: not a file .* And 2 more; see Run\.problems\.") as warned:
        assert len(Run(path).problems) == 3
    assert len(warned) == 1


def test_a_run_without_any_manifest_is_read_from_its_parts(path: Path) -> None:
    (path / "run.json").unlink()
    with pytest.warns(RuntimeWarning, match=r"run\.json: missing; the parts are read without it"):
        run = Run(path)
    assert {c: sorted(n) for c, n in run.tensors.items()} == dict.fromkeys(("gradients", "activations"), sorted(NAMES))
    assert run.spectrum("gradients", "blocks.0.w", 30).count == 31
    RunWriter(path).close()  # is a run still
    assert Run(path).steps == run.steps


def test_nothing_in_a_run_is_code(path: Path) -> None:
    with RunWriter(path) as writer:
        writer.write(Event(step=99, kind="odd", message="", details={"object": object()}))
    assert {p.suffix for p in path.rglob("*") if p.is_file() and not p.name.startswith(".")} == {".json", ".parquet"}
    (event,) = [e for e in Run(path).events() if e.kind == "odd"]
    assert event.details["object"].startswith("<object object")


def test_the_names_of_scalars_are_found_in_parts_of_several_row_groups(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        for step in range(5000):
            writer.write(Scalars(step=step, values={"loss": 1.0, "rate": 0.1, "scale": 2.0}))
    run = Run(tmp_path / "run")
    assert run.scalar_names == ("loss", "rate", "scale")
    assert len(run.scalars("rate")[0]) == 5000


def test_scalars_have_the_times_at_which_they_were_recorded(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(4):
            writer.write(Scalars(step=step, values={"loss": 1.0, "lr": 0.1}, time=1e9 + 10 * step))
    for name in ("loss", "lr"):
        steps, times = Run(tmp_path).scalar_times(name)
        assert (steps.tolist(), times.tolist()) == ([0, 1, 2, 3], [1e9, 1e9 + 10, 1e9 + 20, 1e9 + 30])
    with pytest.raises(NotRecordedError, match="expected a scalar that was recorded; got 'los'"):
        Run(tmp_path).scalar_times("los")


def test_scalars_of_older_runs_have_no_times_also_once_newer_parts_are_merged_in(tmp_path: Path) -> None:
    before = time.time()
    with RunWriter(tmp_path) as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    for part in (tmp_path / "scalars").iterdir():  # as writers left them before there were times
        pq.write_table(pq.ParquetFile(part).read().drop_columns(["time"]).replace_schema_metadata(None), part)
    run = Run(tmp_path)
    assert np.isnan(run.scalar_times("loss")[1]).all() and run.scalars("loss")[1].tolist() == [1.0]
    with RunWriter(tmp_path, resume_from=1) as writer:
        for step in range(1, 40):  # so many flushes that parts are merged
            writer.write(Scalars(step=step, values={"loss": 2.0}))
            writer.flush()
    run = Run(tmp_path)
    steps, times = run.scalar_times("loss")
    assert steps.tolist() == list(range(40)) and np.isnan(times[0])
    assert before <= times[1] and (np.diff(times[1:]) >= 0).all()
    assert run.problems == [] and len(list((tmp_path / "scalars").iterdir())) < 40


def test_a_collection_that_there_is_none_of_is_refused_at_once(path: Path) -> None:
    run = Run(path)
    for read in (run.spectra, run.errors, run.table):
        with pytest.raises(NotRecordedError, match="expected a collection that was recorded; got 'gradient'"):
            read("gradient")
        with pytest.raises(ArgumentError):
            read("gradients", steps=(1, 2))
    assert list(run.spectra("nothing*")) == [] and list(run.spectra("optimizer")) == []


@each("wrong", [None, 3, b"x", [], {}, "", "a\0b"])
@each("reader", ["find", "of", "from_csv", "from_tensorboard", "from_wandb"])
def test_finding_and_importing_need_a_path(reader: str, wrong: object) -> None:
    with pytest.raises(ArgumentError, match=rf"Run\.{reader}: expected the path of .*; got .*\. Give for instance"):
        getattr(Run, reader)(wrong)


@each("seconds", [-1, 0, float("nan"), float("inf"), "1", None, True])
def test_following_needs_time_between_two_looks(path: Path, seconds: object) -> None:
    with pytest.raises(ArgumentError, match=r"Run\.follow: expected poll_seconds to be a number above 0; got"):
        Run(path).follow(poll_seconds=seconds)  # pyright: ignore[reportArgumentType]


@each("seconds", [-1, float("nan"), "1"])
def test_a_timeout_is_a_number_of_seconds(path: Path, seconds: object) -> None:
    with pytest.raises(ArgumentError, match=r"Run\.follow: expected timeout to be a number of at least 0; got"):
        Run(path).follow(timeout=seconds)  # pyright: ignore[reportArgumentType]
    assert list(Run(path).follow(timeout=float("inf"))) == [[0, 10, 20, 30, 40, 50]]


@each("wrong", [3, ["gradients"], {"gradients": 1}])
def test_a_name_is_text(path: Path, wrong: object) -> None:
    run: Any = Run(path)
    for reader in (run.spectra, run.errors, run.table, run.to_pandas):
        for arguments in ({"collection": wrong}, {"name": wrong}):
            with pytest.raises(ArgumentError, match=r"expected (collection|name) to be a name or a glob; got"):
                reader(**arguments)
    with pytest.raises(ArgumentError, match=r"Run\.casts: expected module to be a name or a glob; got"):
        run.casts(wrong)
    with pytest.raises(ArgumentError, match=r"Run\.plot: expected the name of a collection; got"):
        run.plot(wrong)
    for reader in (lambda: run.series(wrong, "w", "rms"), lambda: run.spectrum(wrong, "w", 0)):
        with pytest.raises(NotRecordedError, match="expected a collection that was recorded; got"):
            reader()
    for reader in (lambda: run.series("gradients", NAMES[0], wrong), lambda: report.heatmap(run, statistic=wrong)):
        with pytest.raises(ArgumentError, match=r"expected a statistic among .*; got"):
            reader()
    with pytest.raises(ArgumentError, match=r"View: expected a plimsoll\.Run; got"):
        View(wrong)  # pyright: ignore[reportArgumentType]
