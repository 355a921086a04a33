"""The live page's API: what it answers about runs of every kind, and that no run, however odd, makes it fail."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

from anyio.from_thread import start_blocking_portal
from starlette.testclient import TestClient

import plimsoll as pl
from plimsoll.diagnosis import View
from plimsoll.formats import ALIASES, BLOCKS, ELEMENTS
from plimsoll.report.figure_declaration import DECLARED
from plimsoll.report.figure_registry import FIGURES, figures_of
from plimsoll.report.live.server.app import App, app
from plimsoll.report.page.answers import OFFERED
from plimsoll.report.page.assets import FILES
from plimsoll.report.verdicts.run_summary import summary
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.stories import LAYERS, constant, make_story
from tests.support.patience import HANG_SECONDS
from tests.support.report import hostile_run as hostile

LOW = make_story(samples=6, gradient_std=constant(2.0**-34))
SOUND = make_story(samples=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    SOUND.write(root / "sound")
    LOW.write(root / "sweeps" / "low 1")
    hostile.write(root / "hostile", steps=10)
    RunWriter(root / "empty").close()
    make_story(samples=1).write(root / "one step")
    make_story(samples=1).write(root / "formats")
    with RunWriter(root / "scalars only") as writer:
        writer.write(Scalars(step=3, values={"loss": float("nan"), "scale": float("inf")}))
    shutil.copytree(root / "sound", root / "damaged part")
    for part in (root / "damaged part" / "spectra").iterdir():
        part.write_bytes(b"no parquet")
    shutil.copytree(root / "sound", root / "damaged manifest")
    (root / "damaged manifest" / "run.json").write_text('{"schema": 1, "tensors": ')
    shutil.copytree(root / "sound", root / "odd manifest")
    _edit(root / "odd manifest", world_size="many", created=[])
    shutil.copytree(root / "sound", root / "no numbers")
    _edit(root / "no numbers", settings={"lr": float("nan"), "\ud800": [float("inf")]})
    with RunWriter(root / "logged") as writer:
        for step in range(1510):
            values = {"acc": float("nan") if step in (30, 31, 32) else step % 7, "epoch": step / 100, "nonfinite": 0.0}
            more = {"loss": 1.0, "lr": 1e-3, "loss:b": 1.0, "cast:m:weights": 1.0} if step < 10 else {}
            writer.write(Scalars(step=step, values=values | more))
    RunWriter(root / "settings 1", settings={"lr": 0.1, "every": 10, "optimizer": {"lr": 0.5, "betas": [0.9]}}).close()
    RunWriter(root / "settings 2", settings={"lr": "0.1", "every": 10, "optimizer": {"lr": None}}).close()
    (root / "newer").mkdir()
    (root / "newer" / "run.json").write_text('{"schema": 99, "plimsoll": "run"}')
    (root / "list").mkdir()
    (root / "list" / "run.json").write_text("[1, 2]")
    return root


def _edit(path: Path, **entries: object) -> None:
    manifest = path / "run.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text("utf-8")) | entries))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[App]:
    made = app(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def asked(served: App) -> Iterator[TestClient]:
    """Who asks; all questions of the module in one thread, or each of them would start one and end it."""
    client = TestClient(served, base_url="http://localhost:8642")
    with start_blocking_portal(**client.async_backend) as client.portal:
        yield client


@pytest.fixture
def get(asked: TestClient) -> Any:
    def ask(path: str, status: int = 200, **query: object) -> Any:
        answer = asked.get(path, params={k: str(v) for k, v in query.items()} or None)
        assert answer.status_code == status, answer.text
        return json.loads(answer.text, parse_constant=_no_number)

    return ask


def _no_number(constant: str) -> None:
    raise AssertionError(f"the answer holds {constant}, which is no JSON")


@each("name", [*(fmt.name for fmt in (*ELEMENTS, *BLOCKS)), *ALIASES, "e11m0", "e10m52", "e12m3"])
def test_every_format_is_answered_or_refused(asked: TestClient, name: str) -> None:
    queries = [f"whatif?format={name}", f"whatif?format={name}&shift=2200", f"whatif?format={name}&collection=weights"]
    queries += [f"figure/{figure}?{word}={name}" for figure in figures_of(1) for word in ("format", "formats")]
    statuses = {query: asked.get(f"/api/runs/formats/{query}").status_code for query in queries}
    assert set(statuses.values()) <= {200, 404, 422}, statuses


# -- the list


def test_the_list_has_every_run_below_the_folder(get: Any, folder: Path) -> None:
    answer = get("/api/runs")
    assert answer["folder"] == folder.name
    assert {run["id"] for run in answer["runs"]} == {str(p.relative_to(folder)) for p in Run.find(folder)}
    modified = [run["modified"] for run in answer["runs"]]
    assert modified == sorted(modified, reverse=True)


def test_a_row_says_what_the_manifest_and_the_parts_names_do(get: Any, folder: Path) -> None:
    row = next(run for run in get("/api/runs")["runs"] if run["id"] == "sweeps/low 1")
    run = Run(folder / "sweeps" / "low 1")
    assert (row["name"], row["last_step"], row["closed"], row["live"]) == ("low 1", View(run).last_step, True, False)
    assert row["tensors"] == sum(len(names) for names in run.tensors.values())
    assert (row["ranks"], row["problem"]) == (1, None)
    assert row["created"] == pytest.approx(row["modified"], abs=600)


@pytest.mark.parametrize(
    ("run_id", "problem"),
    [("newer", "Install the plimsoll that wrote it"), ("damaged manifest", "run.json: cannot be read"),
     ("odd manifest", "created: expected a text"), ("list", "run.json: cannot be read")],
)  # fmt: skip
def test_an_unreadable_manifest_costs_its_own_row(get: Any, run_id: str, problem: str) -> None:
    row = next(run for run in get("/api/runs")["runs"] if run["id"] == run_id)
    assert row["state"] == "unreadable" and problem in row["problem"] and row["verdict"] is None


def test_verdicts_come_in_the_background(get: Any, served: App) -> None:
    while served.answers.verdicts.judge_next() is not None:
        pass
    rows = {run["id"]: run for run in get("/api/runs")["runs"]}
    assert rows["sound"]["state"] == "healthy" and rows["sound"]["verdict"].startswith("Healthy through step")
    assert rows["sweeps/low 1"]["state"] == "alarm" and rows["empty"]["state"] == "empty"


def test_settings_are_columns_for_those_who_ask(get: Any) -> None:
    answer = get("/api/runs")
    names = {each["name"]: each["differs"] for each in answer["settings"]}
    assert names["lr"] and names["every"]  # not all runs have them
    assert all(run["settings"] == {} for run in answer["runs"])
    rows = {run["id"]: run["settings"] for run in get("/api/runs?column=lr&column=odd&column=optimizer.lr")["runs"]}
    assert rows["settings 1"] == {"lr": 0.1, "optimizer.lr": 0.5}
    assert rows["settings 2"] == {"lr": "0.1", "optimizer.lr": None}
    assert rows["no numbers"] == {"lr": "NaN"} and rows["sound"] == {}
    columns = "&".join("column=lr" for _ in range(17))
    assert "at most 16 columns" in get(f"/api/runs?{columns}", 422)["error"]


# -- one run


def test_a_runs_page_has_its_summary_and_what_it_recorded(get: Any, folder: Path) -> None:
    answer = get("/api/runs/sweeps%2Flow%201")
    run = Run(folder / "sweeps" / "low 1")
    expected = summary(View(run)).to_dict()
    told_summary = answer["summary"]
    assert told_summary["path"] == "sweeps/low 1" != expected["path"]
    shown = [finding.pop("shown") for finding in told_summary["findings"]]  # for the page
    assert all(shown)
    assert {k: v for k, v in told_summary.items() if k != "path"} == {k: v for k, v in expected.items() if k != "path"}
    assert {k: tuple(v) for k, v in answer["collections"].items()} == dict(run.tensors)
    assert (answer["id"], answer["name"], answer["live"]) == ("sweeps/low 1", "low 1", False)
    assert answer["scalars"] == list(run.scalar_names)
    assert answer["steps"] == {"first": run.steps[0], "last": run.steps[-1], "count": len(run.steps)}
    assert tuple(answer["formats"]) == OFFERED and "fp16" in OFFERED and "nvfp4" not in OFFERED


def test_the_served_folder_can_be_a_run_itself(folder: Path) -> None:
    made = app(folder / "sound")
    asked = TestClient(made, base_url="http://localhost")
    assert asked.get("/api/runs").json()["runs"][0]["id"] == "."
    assert asked.get("/api/runs/%2E%2F").json()["name"] == "sound"
    made.close()


@pytest.mark.parametrize("figure", figures_of(1))
def test_figures_are_the_ones_that_the_room_makes(get: Any, figure: str, folder: Path) -> None:
    query = {"collection": "gradients", "name": f"{LAYERS[0]}.weight"} if figure == "spectrogram" else {}
    drawn = get(f"/api/runs/sound/figure/{figure}", **query)["figure"]
    made = FIGURES[figure](View(Run(folder / "sound")), *query.values())
    assert drawn["layout"]["title"] == json.loads(made.to_json())["layout"]["title"]
    assert [t["type"] for t in drawn["data"]] == [t["type"] for t in json.loads(made.to_json())["data"]]


def test_a_finding_has_its_figure(get: Any) -> None:
    findings = get("/api/runs/sweeps%2Flow%201")["summary"]["findings"]
    for index, finding in enumerate(findings):
        answer = get(f"/api/runs/sweeps%2Flow%201/figure/{finding['figure']}", finding=index)
        assert answer["figure"]["layout"]["title"]["text"]


@pytest.mark.parametrize("shift", [None, -3, 9])
@pytest.mark.parametrize("fmt", ["fp16", "E4M3"])
def test_what_if_is_that_of_the_library(get: Any, folder: Path, shift: int | None, fmt: str) -> None:
    answer = get("/api/runs/sweeps%2Flow%201/whatif", format=fmt, collection="gradients",
                 **({} if shift is None else {"shift": shift}))  # fmt: skip
    expected = pl.whatif(folder / "sweeps" / "low 1", fmt, shift)
    data = expected.to_dict()
    for entry in ("sentence", "shift", "chosen", "overall", "rows", "over_time", "stretches", "censored"):
        assert answer[entry] == data[entry], entry
    assert answer["best_shift"] == pl.whatif(folder / "sweeps" / "low 1", fmt).shift and answer["more"] == 0


def test_what_if_tells_the_worst_rows_and_how_many_more(get: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.report.page.answers._ROWS", 5)
    answer = get("/api/runs/sound/whatif", format="e2m1", collection="weights")
    assert (len(answer["rows"]), answer["more"]) == (5, len(LAYERS) - 5)


# -- two runs


def test_two_runs_are_compared(get: Any) -> None:
    answer = get("/api/compare", a="sound", b="sweeps/low 1")
    assert (answer["a"]["state"], answer["b"]["state"]) == ("healthy", "alarm")
    assert answer["sentence"] and answer["diff"]["first"] is not None
    assert get("/api/compare", a="sound", b="sound")["diff"]["first"] is None


def test_runs_that_cannot_be_compared_are_told_so(get: Any) -> None:
    answer = get("/api/compare", a="sound", b="empty")
    assert answer["diff"] is None
    assert answer["sentence"]


@pytest.mark.parametrize("figure", ["before_after", "loss_and_scale"])
def test_two_runs_in_one_figure(get: Any, figure: str) -> None:
    assert get(f"/api/compare/figure/{figure}", a="sound", b="sweeps/low 1")["figure"]["data"]


# -- whatever is asked of whatever run: an answer or a refusal

RUNS = ("sound", "empty", "one step", "scalars only", "damaged part", "damaged manifest", "odd manifest", "no numbers",
        "newer", "list", "hostile", "none")  # fmt: skip
QUESTIONS = ("", "/whatif?format=fp16", "/whatif?format=e4m3&collection=weights&shift=3", "/figure/loss_and_scale",
             "/figure/heatmap?statistic=zero", "/figure/scale_curve", "/figure/scale_window", "/figure/record",
             "/figure/updates", "/figure/code_usage", "/figure/underflow_over_time", "/figure/zero_heatmap",
             f"/figure/spectrogram?collection=gradients&name={LAYERS[0]}.weight",
             "/figure/record?finding=0")  # fmt: skip


@each("run_id", RUNS)
def test_any_run_gives_an_answer_or_a_refusal(served: App, run_id: str) -> None:
    asked = TestClient(served, base_url="http://localhost:8642")
    for question in QUESTIONS:
        answer = asked.get(f"/api/runs/{run_id.replace(' ', '%20')}{question}")
        data = json.loads(answer.text, parse_constant=_no_number)
        assert answer.status_code in (200, 404, 409, 422), (question, answer.text)
        assert (answer.status_code == 200) == ("error" not in data), question
        assert data.get("error", "serve: expected one").count(": expected ") == 1
    status = asked.get(f"/api/compare?a={run_id}&b=sound").status_code
    assert status in (200, 404, 409)


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/api/runs/sound/figure/none", 404, "expected a figure among"),
        ("/api/runs/sound/figure/before_after", 404, "expected a figure among"),
        ("/api/runs/sound/figure/heatmap?statistic=none", 422, "heatmap: expected"),
        ("/api/runs/sound/figure/heatmap?colour=red", 422, "got colour. Leave it out"),
        ("/api/runs/sound/figure/spectrogram?collection=gradients", 422, "expected name for spectrogram"),
        ("/api/runs/sound/figure/spectrogram?collection=gradients&name=none", 404, "got 'none'"),
        ("/api/runs/sound/figure/spectrogram?collection=gradients&name=x&shift=two", 422, "got 'two'"),
        ("/api/runs/sound/figure/record?finding=-1", 404, "got -1"),
        ("/api/runs/sound/figure/record?finding=99", 404, "got 99"),
        ("/api/runs/sound/figure/record?finding=one", 422, "got 'one'"),
        ("/api/runs/sound/figure/record?finding=0&collection=x", 422, "got collection"),
        ("/api/runs/sound/whatif", 422, "expected format"),
        ("/api/runs/sound/whatif?format=fp17", 422, "Nearest: fp16"),
        ("/api/runs/sound/whatif?format=nvfp4", 404, "Spectrum.fit"),
        ("/api/runs/sound/whatif?format=fp16&shift=1e3", 422, "got '1e3'"),
        ("/api/runs/sound/whatif?format=fp16&shift=99999", 422, "got shift=99999"),
        ("/api/runs/sound/whatif?format=fp16&scale=8", 422, "got format, scale"),
        ("/api/runs/sound/whatif?format=fp16&collection=cats", 404, "got 'cats'"),
        ("/api/compare?a=sound", 422, "expected two runs"),
        ("/api/compare?a=sound&b=none", 404, "expected the id of a run"),
        ("/api/compare/figure/heatmap?a=sound&b=sound", 404, "of two runs"),
        ("/api/compare/figure/loss_and_scale?a=sound", 422, "expected two runs"),
        ("/api/nothing", 404, "nothing at this address"),
    ],
)
def test_what_cannot_be_answered_says_what_was_expected(get: Any, path: str, status: int, message: str) -> None:
    assert message in get(path, status)["error"]


def test_hostile_names_are_answered_as_they_are(get: Any) -> None:
    answer = get("/api/runs/hostile")
    names = {name for each in answer["collections"].values() for name in each}
    assert {name for name in hostile.NAMES if name.isprintable()} <= names | {n.partition(":")[0] for n in names}
    name = next(iter(answer["collections"]["gradients"]))
    drawn = get("/api/runs/hostile/figure/spectrogram", collection="gradients", name=name)["figure"]
    assert drawn["data"]


# -- runs that change under the page


def test_a_run_that_goes_is_gone(tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run")
    made = app(tmp_path)
    asked = TestClient(made, base_url="http://localhost")
    assert asked.get("/api/runs/run").status_code == 200
    shutil.rmtree(tmp_path / "run")
    for path in ("/api/runs/run", "/api/runs/run/figure/record", "/api/runs/run/whatif?format=fp16"):
        assert asked.get(path).status_code == 404
    made.close()


def test_a_run_whose_parts_vanish_while_it_is_read(tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run")
    made = app(tmp_path)
    asked = TestClient(made, base_url="http://localhost")
    assert asked.get("/api/runs/run/figure/loss_and_scale").status_code == 200
    shutil.rmtree(tmp_path / "run" / "spectra")
    assert asked.get("/api/runs/run/whatif?format=fp16").status_code in (404, 409)
    made.close()


def test_a_file_in_place_of_a_folder_of_parts_is_no_change_of_the_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    shutil.rmtree(tmp_path / "run" / "spectra", ignore_errors=True)
    (tmp_path / "run" / "spectra").write_bytes(b"")
    made = app(tmp_path)
    asked = TestClient(made, base_url="http://localhost").get("/api/runs/run")
    assert asked.status_code == 200 and asked.json()["summary"]["findings"] is not None
    made.close()


def test_another_run_in_its_place_is_another_run(tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run")
    made = app(tmp_path)
    asked = TestClient(made, base_url="http://localhost")
    first = asked.get("/api/runs/run").json()
    before = asked.get("/api/runs/run/whatif?format=fp16").json()
    shutil.rmtree(tmp_path / "run")
    LOW.write(tmp_path / "run")
    later = asked.get("/api/runs/run/whatif?format=fp16").json()
    assert later["overall"] != before["overall"]
    assert later["overall"] == pl.whatif(tmp_path / "run", "fp16").to_dict()["overall"]
    assert later["token"].partition("-")[0] != first["token"].partition("-")[0]
    while made.answers.verdicts.judge_next() is not None:
        pass
    assert asked.get("/api/runs/run").json()["summary"]["state"] == "alarm"
    made.close()


# -- who waits for whom


def test_a_slow_question_to_one_run_delays_no_other(served: App) -> None:
    held, done = threading.Event(), threading.Event()

    def slow(_: object) -> bytes:
        held.set()
        assert done.wait(HANG_SECONDS)
        return b"{}"

    thread = threading.Thread(target=lambda: served.answers.live.answer("sound", "slow", slow))
    thread.start()
    assert held.wait(HANG_SECONDS)
    asked = TestClient(served, base_url="http://localhost:8642")
    assert asked.get("/api/runs/one%20step/figure/record").status_code == 200
    assert asked.get("/api/runs").status_code == 200
    assert not done.is_set()
    done.set()
    thread.join()


def test_who_waits_too_long_is_told_so(served: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.report.live.live_runs._PATIENCE_SECONDS", 0.01)
    held, done = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=lambda: served.answers.live.answer("sound", "slower", lambda _: (held.set(), done.wait(HANG_SECONDS)))
    )
    thread.start()
    assert held.wait(HANG_SECONDS)
    asked = TestClient(served, base_url="http://localhost:8642")
    answer = asked.get("/api/runs/sound/figure/updates?collection=updates")
    done.set()
    thread.join()
    assert answer.status_code == 409 and "Ask again" in answer.json()["error"]


def test_an_answer_is_made_once_for_each_state_of_a_run(served: App, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, made = TestClient(served, base_url="http://localhost:8642"), []
    whole = DECLARED["scale_curve"]
    counted = replace(whole, function=lambda run, fmt=None: made.append(1) or whole.function(run, fmt))
    monkeypatch.setitem(DECLARED, "scale_curve", counted)
    for _ in range(3):
        assert asked.get("/api/runs/one%20step/figure/scale_curve?format=bf16").status_code == 200
    assert len(made) == 1


# -- scalars


def test_a_scalar_is_all_its_values_or_means_between_extremes(get: Any, folder: Path) -> None:
    steps, values = Run(folder / "logged").scalars("acc")
    answer = get("/api/runs/logged/scalar", name="acc")
    each = -(-len(steps) // 600)
    assert each == 3 and answer["each"] == each and len(answer["step"]) == -(-len(steps) // each)
    finite = np.where(np.isfinite(values), values, np.nan)
    for place in (0, 5, len(answer["step"]) - 1):
        part = finite[each * place : each * (place + 1)]
        expected = np.nanmean(part), np.nanmin(part), np.nanmax(part)
        assert [answer[key][place] for key in ("mean", "low", "high")] == pytest.approx(expected, rel=1e-5)
    assert answer["nonfinite"] == 3 and answer["mean"][10] is None  # steps 30 to 32 have no finite value
    assert answer["epoch"][20] == pytest.approx(answer["step"][20] / 100)
    assert len(answer["time"]) == len(answer["step"]) and None not in answer["time"]
    short = get("/api/runs/logged/scalar", name="lr")
    assert short["each"] == 1 and "low" not in short and short["mean"] == pytest.approx([1e-3] * 10)
    assert "epoch" not in get("/api/runs/logged/scalar", name="epoch")
    assert "epoch" not in get("/api/runs/sound/scalar", name="loss")


def test_scalars_come_in_the_order_in_which_they_are_asked_about(get: Any) -> None:
    assert get("/api/runs/logged")["scalars"] == ["loss", "loss:b", "acc", "epoch", "lr", "nonfinite", "cast:m:weights"]


@each("query, status", [({}, 422), ({"name": "x", "axis": "y"}, 422), ({"name": "none"}, 404), ({"name": ""}, 422)])
def test_a_scalar_that_is_not_there_is_refused(get: Any, query: dict[str, str], status: int) -> None:
    assert "serve: expected" in get("/api/runs/logged/scalar", status, **query)["error"]


# -- the static page


def test_assets_are_asked_for_again_only_when_they_changed(served: App) -> None:
    asked = TestClient(served, base_url="http://localhost:8642")
    first = asked.get("/assets/plotly.min.js")
    assert first.status_code == 200 and first.headers["content-type"].startswith("text/javascript")
    again = asked.get("/assets/plotly.min.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert set(asked.get("/assets/templates.json").json()) == {"light", "dark"}


def test_addresses_of_a_version_are_kept_for_ever_and_others_asked_for_again(served: App) -> None:
    asked = TestClient(served, base_url="http://localhost:8642")
    index = asked.get("/")
    assert index.headers["cache-control"] == "no-cache"
    places = set(re.findall(r'(?:href|src)="([^"#]+)"', index.text))
    assert len(places) > 20 and all(re.match(r"/assets/[0-9a-f]{16}/", place) for place in places)
    for place in places:
        answer = asked.get(place)
        assert answer.status_code == 200 and "immutable" in answer.headers["cache-control"], place
        plain = asked.get(f"/assets/{place.split('/', 3)[3]}")
        assert (plain.content, plain.headers["cache-control"]) == (answer.content, "no-cache")
    # A page of the version before asks for files that are there under the present version.
    former = asked.get("/assets/0123456789abcdef/plotly.min.js")
    assert (former.status_code, former.headers["cache-control"]) == (200, "no-cache")


def test_every_module_is_named_in_the_page_so_that_all_are_fetched_at_once(served: App) -> None:
    index = TestClient(served, base_url="http://localhost:8642").get("/").text
    named = re.findall(r'rel="modulepreload" href="/assets/\w+/js/([\w/]+\.js)"', index)
    modules = {path.relative_to(FILES / "js").as_posix() for path in (FILES / "js").rglob("*.js")}
    assert set(named) == modules - {"first.js"} and len(named) == len(set(named))


@each(
    "accepts",
    [("gzip", True), ("br, gzip;q=0.5", True), ("identity", False), ("gzip;q=0", False), ("", False), ("xgzip", False)],
)
def test_files_and_large_answers_are_compressed_for_those_who_ask(served: App, accepts: tuple[str, bool]) -> None:
    header, packed = accepts
    asked = TestClient(served, base_url="http://localhost:8642")
    for path in ("/", "/assets/plotly.min.js", "/api/runs/sound"):
        answer = asked.get(path, headers={"accept-encoding": header})
        assert (answer.headers.get("content-encoding") == "gzip") == packed, path
        assert answer.headers["vary"] == "accept-encoding"
        plain = asked.get(path, headers={"accept-encoding": "identity"})
        assert answer.content == plain.content and "content-encoding" not in plain.headers
        sent = int(answer.headers["content-length"])
        assert sent < 0.5 * len(plain.content) if packed else sent == len(plain.content)
    small = asked.get("/api/figures/none", headers={"accept-encoding": header})
    assert "content-encoding" not in small.headers


@each("path", ["", "none.js", "../_server.py", "%2e%2e/_server.py", "..%2F_server.py", "/etc/passwd"])
def test_nothing_else_is_an_asset(served: App, path: str) -> None:
    assert TestClient(served, base_url="http://localhost:8642").get(f"/assets/{path}").status_code == 404
