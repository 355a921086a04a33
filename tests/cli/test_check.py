"""``plimsoll check``: what it prints, in 80 columns, and its exit code."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.diagnosis import RULES
from plimsoll.runs import Run, RunWriter
from plimsoll.runs.storage import location
from tests.support.diagnosis import planned
from tests.support.diagnosis.faults import falling
from tests.support.diagnosis.stories import SOUND, constant, make_story
from tests.support.runs import making


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    story = make_story(scale=falling(60, 14), gradient_std=constant(2.0**-19))
    return story.write(tmp_path_factory.mktemp("check") / "run")


def test_a_healthy_run_exits_with_0(tmp_path: Path) -> None:
    result = run("check", SOUND.write(tmp_path / "run"))
    assert result.exit_code == 0
    assert result.stdout.endswith("run: Healthy through step 199: no parameter gradients lost to underflow.\n")


def test_a_later_training_that_was_meant_for_the_folder_is_named(tmp_path: Path) -> None:
    """`plimsoll run -o first` twice: the second is in first-2, and whoever checks first sees the old verdict."""
    SOUND.write(tmp_path / "first-3")  # in a notebook the earlier one gets the number
    first = SOUND.write(tmp_path / "first")
    assert "later training" not in run("check", first).stderr
    SOUND.write(tmp_path / "first-2")
    (tmp_path / "first-4").mkdir()
    (tmp_path / "first-4" / "run.json").write_text("{no json")
    result = run("check", first)
    assert result.stderr == f"plimsoll: a later training is in {tmp_path}/first-2: plimsoll check {tmp_path}/first-2\n"
    assert result.exit_code == 0
    assert run("check", first, "-q").stderr == ""


def test_an_alarm_exits_with_1_and_says_where_since_when_and_what_to_do(ill: Path) -> None:
    result = run("check", ill)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert "alarm   scale-collapse  steps 60 to 199" in lines
    assert "parameter gradients of all 12 layers: blocks.{0-5}.attn, blocks.{0-5}.mlp" in " ".join(
        result.stdout.split()
    )
    assert lines[1].startswith("Problem: the loss scale fell from 2^10 to 2^-4 at steps 60 to 199")
    assert all(len(line) <= 80 for line in lines[1:])  # the first is the folder's path, unbroken


def test_json_has_everything(ill: Path) -> None:
    result = run("check", ill, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (
        data["state"] == "alarm"
        and data["verdict"].startswith("Problem: the loss scale fell")
        and data["last_step"] == 199
    )
    first = data["findings"][0]
    assert set(first) == {
        "rule", "severity", "since_step", "until_step", "collection", "where", "spots", "evidence", "meaning", "advice",
        "actions", "figure",
    }  # fmt: skip


def test_rules_are_chosen_and_thresholds_set(ill: Path) -> None:
    assert run("check", ill, "--select", "loss-*").exit_code == 0
    assert run("check", ill, "--select", "scale-collapse").exit_code == 1
    quiet = run("check", ill, "--select", "scale-collapse", "--set", "scale-collapse.binades=99",
                "--set", "scale-collapse.floor=0")  # fmt: skip
    assert quiet.exit_code == 0
    assert run("check", ill, "--until", 50).exit_code == 0


def test_the_rules_are_listed_with_their_thresholds_and_sources() -> None:
    listed = run("check", "--rules", "--set", "underflow-high.values=0.125")
    assert listed.exit_code == 0
    assert all(rule.id in listed.stdout for rule in RULES)
    assert "0.125" in listed.stdout and all(len(line) <= 80 for line in listed.stdout.splitlines())
    data = json.loads(run("check", "--rules", "--json").stdout)
    assert [each["rule"] for each in data] == [rule.id for rule in RULES]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check"], "check: expected a run's folder; got none"),
        (["check", "."], "No Plimsoll run in"),
        (["check", ".", "--set", "underflow-high.values"], "check: expected --set RULE.THRESHOLD=VALUE with a number"),
        (["check", ".", "--set", "underflow-high.values=much"], "check: expected --set RULE.THRESHOLD=VALUE"),
        (["check", "--rules", "underflow-high"], "check: expected --rules without RUN"),
        (["check", "--rules", "--select", "nonfinite"], "check: expected --rules without --select"),
        (["check", "--rules", "--set", "no.thing=1"], "check: expected a threshold written as rule.threshold"),
    ],
)
def test_what_cannot_be_done_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.stderr


def test_a_rule_that_is_not_there_is_named_as_the_option_was(ill: Path) -> None:
    for name, hint in (
        ("zzz", r"plimsoll check --rules lists all\.\n"),
        ("underflow-hihg", r"Nearest: underflow-high[a-z, -]*\. plimsoll check --rules lists all\.\n"),
    ):
        result = run("check", ill, ill, "--select", name)
        assert (result.exit_code, result.stdout) == (2, "")
        message = f"plimsoll: check: expected --select to match the id of a rule; got {name!r}. "
        assert re.fullmatch(re.escape(message) + hint, result.stderr), result.stderr


def test_a_run_of_a_newer_schema_exits_with_2(tmp_path: Path) -> None:
    path = making.written(tmp_path / "run", [0])
    manifest = path / "run.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text("utf-8")), "schema": 99}))
    result = run("check", path)
    assert result.exit_code == 2 and "schema" in result.stderr


COMMANDS = (
    ["check"], ["check", "--json"], ["whatif", "--format", "fp16"], ["plan", "--target", "fp16"],
    ["report", "--json"], ["report", "--output-format", "markdown"], ["report", "-o", "out.html"], ["diff"],
)  # fmt: skip


def ran(command: list[str], *places: Path) -> Result:
    name, *options = command
    return run(name, *(places * 2 if name == "diff" and len(places) == 1 else places), *options)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_cannot_be_judged_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sound = SOUND.write(tmp_path / "runs" / "fp16")
    with RunWriter(tmp_path / "runs" / "empty"):
        pass
    (tmp_path / "runs" / "notes.txt").touch()
    cases = {
        tmp_path / "runs": r"No Plimsoll run in .*runs\. Runs below it: .*/runs/empty, .*/runs/fp16\. Name one of them",
        tmp_path / "nowhere": r"No Plimsoll run in .*nowhere\. Name the folder",
        tmp_path / "runs" / "fp16" / "spectra": r"No Plimsoll run in .*spectra\. Name the folder",
        tmp_path / "runs" / "empty": r"Nothing was recorded in .*empty: it holds a run without a step",
    }
    for place, message in cases.items():
        result = ran(command, place)
        assert result.exit_code == 2 and result.stdout == "", (place, result.output)
        assert re.search(message, result.stderr), (place, result.stderr)
    assert not list(tmp_path.glob("out*")) and not list(recwarn)
    if command[0] != "whatif":
        result = ran([*command, "--until", "-5"], sound)
        assert result.exit_code == 2 and "expected --until to be a step, 0 or later; got -5" in result.stderr


def test_a_run_without_a_step_is_said_to_be_live_closed_or_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunWriter(tmp_path / "run"):
        assert "Records appear some seconds after" in run("check", tmp_path / "run").stderr
        monkeypatch.setattr(Run, "was_abandoned", True)
        assert "Its process is gone" in run("check", tmp_path / "run").stderr
    assert "Its watch was closed" in run("check", tmp_path / "run").stderr


def test_a_step_before_the_first_one_exits_with_2(tmp_path: Path) -> None:
    path = making.written(tmp_path / "run", [10, 20])
    result = run("check", path, "--until", 5)
    assert result.exit_code == 2 and "Nothing was recorded in" in result.stderr
    assert "up to step 5. It has steps 10 to 20." in result.stderr


# -- the models of one script


@pytest.fixture(scope="module")
def gan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script") / "gan"
    SOUND.write(folder / "G")
    make_story(scale=falling(60, 14), gradient_std=constant(2.0**-19)).write(folder / "D")
    location.write_script(folder, ["G", "D"])
    return folder


def test_a_folder_of_a_script_is_one_answer_and_its_exit_code_the_worst(gan: Path) -> None:
    result = run("check", gan)
    assert result.exit_code == 1
    assert f"{gan}/G: Healthy" in result.stdout.replace("\n", "") and "scale-collapse" in result.stdout
    data = json.loads(run("check", gan, "--json").stdout)
    assert data["state"] == "alarm" and [each["model"] for each in data["runs"]] == ["G", "D"]
    assert [each["state"] for each in data["runs"]] == ["healthy", "alarm"]
    assert run("check", gan, "--select", "loss-*").exit_code == 0


def test_the_first_model_may_be_the_folder_itself(gan: Path, tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run")
    shutil.copytree(gan / "D", tmp_path / "run" / "D")
    result = run("check", tmp_path / "run")
    assert result.exit_code == 0 and "D: not a file of this run; left alone" in result.stderr
    location.write_script(tmp_path / "run", [location.ITSELF, "D"])
    result = run("check", tmp_path / "run")
    assert result.exit_code == 1 and "not a file of this run" not in result.output


def test_every_command_takes_the_folder_of_a_script(gan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = json.loads(run("whatif", gan, "--format", "fp16", "--json").stdout)
    assert [each["model"] for each in asked["runs"]] == ["G", "D"]
    assert "gan/G" in run("whatif", gan, "--format", "fp16").stdout
    assert run("report", gan, "-o", "page.html").exit_code == 0
    assert sorted(p.name for p in tmp_path.glob("page*")) == ["page-D.html", "page-G.html"]
    told_of = json.loads(run("report", gan, "--json").stdout)
    assert [each["state"] for each in told_of["runs"]] == ["healthy", "alarm"]
    assert run("report", gan, "--output-format", "markdown").stdout.count("## ") >= 2
    alike = run("diff", gan, gan)
    assert alike.exit_code == 0 and alike.stdout.count("do not diverge") == 2
    shutil.copytree(gan / "G", tmp_path / "one" / "G")
    location.write_script(tmp_path / "one", ["G"])
    assert run("diff", gan, tmp_path / "one").exit_code == 1  # only one of them trains D
    assert run("diff", gan, gan / "D").exit_code == 2


def test_each_model_of_a_script_gets_a_plan(tmp_path: Path) -> None:
    for name in ("G", "D"):
        planned.written(tmp_path / "gan" / name, [planned.layers({f"{name}.up": 1.0}, step=s) for s in range(2)])
    location.write_script(tmp_path / "gan", ["G", "D"])
    made = run("plan", tmp_path / "gan", "--target", "bf16", "-o", tmp_path / "plan.toml")
    assert made.exit_code == 0
    assert sorted(p.name for p in tmp_path.glob("plan*")) == ["plan-D.toml", "plan-G.toml"]
    refused = run("plan", tmp_path / "gan", "--check", tmp_path / "plan-D.toml")
    assert refused.exit_code == 2 and "expected the run of one model" in refused.stderr
    assert run("plan", tmp_path / "gan" / "D", "--check", tmp_path / "plan-D.toml").exit_code == 0


def test_a_script_whose_run_is_missing_cannot_be_judged(gan: Path, tmp_path: Path) -> None:
    shutil.copytree(gan, tmp_path / "gan")
    shutil.rmtree(tmp_path / "gan" / "D")
    assert run("check", tmp_path / "gan").exit_code == 2
    for text in ('{"runs": ["../other"]}', '{"runs": 3}', "[]", "nonsense"):
        (tmp_path / "gan" / "script.json").write_text(text)
        result = run("check", tmp_path / "gan")
        assert result.exit_code == 2 and "script.json" in result.stderr and "Traceback" not in result.stderr


# -- several runs, and forms for programs


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several") / "runs"
    SOUND.write(folder / "sound")
    make_story(scale=falling(60, 14), gradient_std=constant(2.0**-19)).write(folder / "ill")
    (folder / "notes.txt").touch()
    return folder


def test_several_runs_are_judged_each_by_itself(several: Path) -> None:
    result = run("check", several / "sound", several / "ill")
    assert result.exit_code == 1
    assert "sound: Healthy" in result.stdout and "scale-collapse" in result.stdout
    data = json.loads(run("check", several / "sound", several / "ill", "--json").stdout)
    assert (data["state"], data["last_step"]) == ("alarm", 199) and data["verdict"].startswith("Problem")
    assert [each["run"] for each in data["runs"]] == [str(several / "sound"), str(several / "ill")]
    assert run("check", several / "sound", several / "sound").exit_code == 0


def test_globs_find_the_runs(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(several.parent)
    data = json.loads(run("check", "runs/*", "--json").stdout)
    assert [each["run"] for each in data["runs"]] == ["runs/ill", "runs/sound"]
    assert run("check", "runs/s*d").exit_code == 0
    nothing = run("check", "runs/x*")
    assert nothing.exit_code == 2 and "No folder matches 'runs/x*'. plimsoll ls lists" in nothing.stderr
    SOUND.write(several / "[a]")
    assert run("check", "runs/[a]").exit_code == 0  # a path that exists is no glob
    shutil.rmtree(several / "[a]")


def test_runs_are_named_so_that_they_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "one more"):
        SOUND.write(tmp_path / "runs" / name)
    begin = f"plimsoll: No Plimsoll run in {tmp_path}"
    below = "Runs below it: runs/first, 'runs/one more'. Name one of them"
    assert run("check", "runs").stderr == f"{begin}/runs. {below}, or all: plimsoll check 'runs/*'.\n"
    assert run("report", "runs").stderr == f"{begin}/runs. {below}.\n"
    assert run("check", "runs/*").exit_code == 0
    assert run("check", "runs/first2").stderr == f"{begin}/runs/first2. Did you mean runs/first?\n"
    assert "Name the folder that" in run("check", "runs/zzz").stderr
    assert "Name the folder that" in run("check", "nowhere/first").stderr
    monkeypatch.chdir(tmp_path / "runs")
    assert "Runs below it: first, 'one more'. Name one of them, or all: plimsoll check '*'." in run("check", ".").stderr


def test_one_run_that_cannot_be_judged_leaves_the_others(several: Path, tmp_path: Path) -> None:
    result = run("check", tmp_path, several / "sound")
    assert result.exit_code == 2 and "No Plimsoll run in" in result.stderr and "Healthy" in result.stdout
    assert run("check", tmp_path, tmp_path).exit_code == 2


def test_a_run_that_cannot_be_judged_is_no_healthy_one(several: Path, tmp_path: Path) -> None:
    nope = tmp_path / "nope"
    assert run("check", several / "ill", nope).exit_code == 2  # the alarm does not hide it
    assert run("check", several / "ill", nope, "--fail-on", "never").exit_code == 2
    for judged, state in (([several / "ill"], "alarm"), ([several / "sound"], "empty"), ([nope], "empty")):
        result = run("check", *judged, nope, "--json")
        data = json.loads(result.stdout)
        assert (result.exit_code, data["state"]) == (2, state)
        last = data["runs"][-1]
        assert (last["run"], last["state"]) == (str(nope), "empty") and last["findings"] == []
        assert last["error"].startswith(f"No Plimsoll run in {nope}") and last["error"] in result.stderr
    assert data["last_step"] == -1 and data["verdict"] == last["error"]


def test_the_shape_of_json_depends_on_the_arguments_alone(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that reads `runs` of a glob must not fail once the glob matches one run."""
    monkeypatch.chdir(several.parent)
    one, matched = (json.loads(run("check", word, "--json").stdout) for word in ("runs/sound", "runs/s*d"))
    assert set(matched) == {"state", "verdict", "last_step", "runs"}
    assert matched["runs"] == [{"model": "", **one}] and "runs" not in one
    Path("runs/none").mkdir()
    result = run("check", "runs/no*e", "--json")
    Path("runs/none").rmdir()
    assert result.exit_code == 2 and json.loads(result.stdout)["runs"][0]["run"] == "runs/none"


def test_forms_that_contradict_each_other_are_refused(ill: Path) -> None:
    for form in ("concise", "github", "text"):
        result = run("check", ill, "--json", "--output-format", form)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"check: expected either --json or --output-format {form}; got both" in result.stderr
    assert run("check", ill, "--json", "--output-format", "json").stdout == run("check", ill, "--json").stdout


def test_the_severity_that_fails_is_chosen(ill: Path, tmp_path: Path) -> None:
    def code(path: Path, *arguments: str) -> int:
        return run("check", path, *arguments).exit_code

    sound = SOUND.write(tmp_path / "sound")
    assert [code(ill, "--fail-on", s) for s in ("warning", "alarm", "never")] == [1, 1, 0]
    # Of the sick run's rules, one whose finding is a warning.
    only = ("--select", "underflow-high", "--set", "underflow-high.grave=2", "--set", "underflow-high.layers=2")
    severities = {f["severity"] for f in json.loads(run("check", ill, *only, "--json").stdout)["findings"]}
    assert severities == {"warning"}
    assert [code(ill, *only, "--fail-on", s) for s in ("warning", "alarm", "never")] == [1, 0, 0]
    assert code(sound, "--fail-on", "warning") == 0
    assert code(tmp_path, "--fail-on", "never") == 2
    assert code(sound, "--fail-on", "info") == 2


def test_concise_is_one_line_a_finding(ill: Path, several: Path) -> None:
    result = run("check", ill, several / "sound", "--output-format", "concise")
    lines = result.stdout.splitlines()
    found = json.loads(run("check", ill, "--json").stdout)["findings"]
    assert result.exit_code == 1 and len(lines) == len(found) + 1
    assert lines[0].startswith(f"{ill}: alarm: scale-collapse: steps 60 to 199: Many steps in a row overflowed")
    assert lines[-1] == f"{several / 'sound'}: healthy, through step 199"


def test_github_shows_findings_as_annotations(ill: Path, several: Path) -> None:
    result = run("check", ill, several / "sound", "--output-format", "github")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert re.match(r"::error title=scale-collapse in [^:,]*::steps 60 to 199: Many steps", lines[0]), lines[0]
    assert any(line.startswith("::warning title=underflow-high in ") for line in lines)
    assert not lines[-1].startswith("::")


def test_what_a_workflow_would_read_as_its_own_syntax_is_escaped() -> None:
    from plimsoll.cli.screens import findings

    assert findings._escaped("97 %\r\n::error::x") == "97 %25%0D%0A::error::x"
    assert findings._property("a:b,c%") == "a%3Ab%2Cc%25"


def test_a_pipe_gets_whole_lines_without_padding(ill: Path) -> None:
    result = CliRunner().invoke(app, ["check", str(ill)], env={"COLUMNS": None})
    lines = result.stdout.splitlines()
    assert lines[1].startswith("Problem: ") and lines[1].endswith(".") and len(lines[1]) > 120
    assert not [line for line in lines if line != line.rstrip()]
    whatif = CliRunner().invoke(app, ["whatif", str(ill), "--format", "fp16"], env={"COLUMNS": None}).stdout
    assert "blocks.0.attn.weight" in whatif and not [line for line in whatif.splitlines() if line != line.rstrip()]


def test_quiet_is_the_exit_code_alone(ill: Path) -> None:
    result = run("check", ill, "-q")
    assert (result.exit_code, result.output) == (1, "")
    assert run("-q", "check", ill, "--json").stdout == run("check", ill, "--json").stdout
