"""``plimsoll mcp``, asked over standard input and output by the client of the protocol's own library."""

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from mcp import Client, StdioServerParameters
from typer.testing import CliRunner

import plimsoll as pl
from plimsoll.cli import app
from plimsoll.runs import RunWriter, Scalars
from tests.support import processes
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS

STEPS = 200
TOOLS = {"runs", "findings", "whatif", "plan", "parity", "receipt"}
Asked = tuple[str, Mapping[str, object]]


def write_losses(folder: Path, seed: int, added: float = 0.0) -> None:
    rng = np.random.default_rng(seed)
    with RunWriter(folder) as writer:
        for step, value in enumerate((2 + added + rng.normal(0, 0.01, STEPS)).tolist()):
            writer.write(Scalars(step=step, values={"loss": value}))


def train(folder: Path) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with pl.watch(model, optimizer, run=folder, every=5, quiet=True):
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()


PARITY = {"base": ["base"], "candidate": ["worse"], "tolerance": "5%"}
QUESTIONS: Mapping[str, Asked] = {
    "runs": ("runs", {"sort": "name"}),
    "findings": ("findings", {"run": "group/trained"}),
    "whatif": ("whatif", {"run": "group/trained", "fmt": "e4m3"}),
    "plan": ("plan", {"run": "group/trained", "target": "bf16"}),
    "parity": ("parity", PARITY),
    "receipt": ("receipt", {"run": "group/trained", "declared": "amp-bf16"}),
    "globs": ("parity", {**PARITY, "candidate": ["wor*"]}),
    "a csv file": ("parity", {**PARITY, "candidate": ["export.csv"]}),
    "missing records": ("findings", {"run": "damaged"}),
}
REFUSED: Mapping[str, tuple[Asked, str]] = {
    "no run": (("findings", {"run": "nowhere"}), "No Plimsoll run in"),
    "outside": (("findings", {"run": "../outside"}), "expected a path below the served folder"),
    "absolute": (("whatif", {"run": "/", "fmt": "fp16"}), "expected a path below the served folder"),
    "a link": (("findings", {"run": "link"}), "expected a path below the served folder"),
    "a link in a script's folder": (("findings", {"run": "several"}), "expected a path below the served folder"),
    "a NUL": (("findings", {"run": "a\0b"}), "expected a path below the served folder"),
    "a glob outside": (("parity", {**PARITY, "base": ["../*"]}), "expected a path below the served folder"),
    "a plan outside": (
        ("receipt", {"run": "group/trained", "declared": "../plan.toml"}),
        "expected a path below the served folder",
    ),
    "a URI": (("findings", {"run": "s3://bucket/run"}), "No Plimsoll run in"),
    "no format": (("whatif", {"run": "group/trained", "fmt": "fp17"}), "Nearest: fp16"),
    "no tolerance": (("parity", {**PARITY, "tolerance": "0"}), "expected tolerance to be above 0"),
    "no scalar": (("parity", {**PARITY, "scalar": "eval_loss"}), "'eval_loss'"),
    "no base": (("parity", {**PARITY, "base": []}), "expected"),
    "a script": (("receipt", {"run": "train.py"}), "No Plimsoll run in"),
    "a wrong argument": (("findings", {"run": 3}), "run"),
    "no tool": (("delete", {}), "delete"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("mcp")
    root = top / "runs"
    write_losses(root / "base", 0)
    write_losses(root / "worse", 1, added=0.3)
    write_losses(top / "outside", 3)
    train(root / "group" / "trained")
    shutil.copytree(root / "group" / "trained", root / "damaged")
    part = next((root / "damaged" / "scalars").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-40])
    (root / "link").symlink_to(top / "outside")
    (root / "several").mkdir()
    (root / "several" / "script.json").write_text(json.dumps({"schema": 1, "runs": ["model"]}))
    (root / "several" / "model").symlink_to(top / "outside")
    (root / "export.csv").write_text("step,loss\n" + "".join(f"{step},2.0\n" for step in range(STEPS)))
    (root / "train.py").write_text("raise SystemExit('this must not run')\n")
    (top / "plan.toml").write_text("target = 'fp16'\n")
    return root


def state(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def session(folder: Path) -> dict[str, Any]:
    """One conversation with one server: its tools, and what it answered to each question."""
    server = StdioServerParameters(
        command=str(processes.commands() / "plimsoll"),
        args=["mcp", str(folder)],
        env={"PYTHONPATH": processes.PYTHONPATH, "OMP_NUM_THREADS": "1"},
    )

    async def converse() -> dict[str, Any]:
        asked = {**QUESTIONS, **{name: question for name, (question, _) in REFUSED.items()}}
        with anyio.fail_after(HANG_SECONDS):
            async with Client(server) as client:
                tools = (await client.list_tools()).tools
                answers = {name: await client.call_tool(tool, dict(given)) for name, (tool, given) in asked.items()}
                return {"tools": tools, "answers": answers, "info": client.server_info}

    before = state(folder.parent)
    found = anyio.run(converse)
    assert state(folder.parent) == before  # nothing is written
    return found


def command(*arguments: object) -> Any:
    return json.loads(CliRunner().invoke(app, [*map(str, arguments), "--json"]).stdout)


def test_it_offers_the_questions_and_nothing_that_writes(session: dict[str, Any]) -> None:
    assert {tool.name for tool in session["tools"]} == TOOLS
    assert all(tool.annotations.read_only_hint and not tool.annotations.open_world_hint for tool in session["tools"])
    assert all("Args:" in tool.description for tool in session["tools"])
    assert (session["info"].name, session["info"].version) == ("plimsoll", pl.__version__)


def test_each_answer_is_that_of_its_command(session: dict[str, Any], folder: Path) -> None:
    trained = folder / "group" / "trained"
    expected = {
        "findings": command("check", trained),
        "whatif": command("whatif", trained, "--format", "e4m3"),
        "plan": command("plan", trained, "--target", "bf16"),
        "parity": command("parity", folder / "base", "--against", folder / "worse", "--tolerance", "5%"),
        "receipt": command("receipt", trained, "--declared", "amp-bf16"),
    }
    answers = {name: session["answers"][name] for name in expected}
    assert {name: answer.structured_content for name, answer in answers.items()} == expected
    assert all(json.loads(answer.content[0].text) == expected[name] for name, answer in answers.items())
    assert expected["parity"]["verdict"] == "worse"
    assert session["answers"]["globs"].structured_content == expected["parity"]
    assert session["answers"]["a csv file"].structured_content["verdict"] == "equivalent"


def test_runs_are_named_by_paths_that_the_other_questions_take(session: dict[str, Any]) -> None:
    rows = session["answers"]["runs"].structured_content["runs"]
    assert [row["path"] for row in rows] == ["base", "damaged", "group/trained", "worse"]
    assert {row["path"]: row["state"] for row in rows}["base"] == "closed"


def test_records_that_are_missing_are_reported(session: dict[str, Any]) -> None:
    answer = session["answers"]["missing records"].structured_content
    (missing,) = answer["missing_records"]["damaged"]
    assert "scalars" in missing and answer["state"] == "warning"


@each("name", REFUSED)
def test_what_cannot_be_answered_is_an_error_in_words(name: str, session: dict[str, Any]) -> None:
    answer = session["answers"][name]
    assert answer.is_error and REFUSED[name][1] in answer.content[0].text, answer.content
    assert "Traceback" not in answer.content[0].text


def test_the_entry_for_a_client_starts_the_server(folder: Path) -> None:
    entry = command("mcp", folder)["mcpServers"]["plimsoll"]
    assert entry["command"] == sys.executable and entry["args"] == ["-m", "plimsoll", "mcp", str(folder)]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["mcp", str(tmp_path / "none")])
    assert result.exit_code == 2 and "No such folder" in result.stderr


def test_a_missing_package_names_the_line_that_installs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    result = CliRunner().invoke(app, ["mcp", str(folder)])
    assert result.exit_code == 2 and "pip install 'mcp>=2.0'" in result.stderr
