"""`plimsoll receipt`: one step of a script, what can go wrong with scripts, and recorded runs."""

import contextlib
import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import plimsoll as pl
from plimsoll.cli import app
from plimsoll.cli.commands import receipt as command
from plimsoll.precision import LEVELS
from plimsoll.precision.levels.catalogue import ALIASES
from plimsoll.receipts.rendering import ENDINGS
from tests.support import processes
from tests.support.cases import each

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONWARNINGS", "RANK"}} | {
    "OMP_NUM_THREADS": "1"
}
HEAD = """
import sys, torch
import torch.nn.functional as F
from torch import nn
print("from the script", sys.argv[1:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
x, y = torch.randn(8, 16), torch.randint(4, (8,))
"""
LOOP = """
optimizer = torch.optim.AdamW(model.parameters())
for index in range(100):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    F.cross_entropy(out.float(), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", index)
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(HEAD + textwrap.dedent(body), encoding="utf-8")
    return path


def receipt(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "plimsoll", "receipt", *arguments, cwd=cwd, env=ENVIRONMENT | environment)


def here(*arguments: object, cwd: Path) -> Result:
    """The command in this process, for what runs no script."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, ["receipt", *map(str, arguments)])


def answer(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode in (0, 1), result.stderr
    return json.loads(result.stdout)


def test_what_is_listed_without_torch_is_what_there_is():
    assert {*command.LEVELS} == {*LEVELS, *ALIASES}
    assert command.ENDINGS == ENDINGS


def test_a_script_is_stopped_after_its_second_step(tmp_path: Path):
    script(tmp_path, LOOP + "\nprint('never reached')\n")
    result = receipt("train.py", "--declared", "amp-bf16", "--json", "--lr", "0.1", cwd=tmp_path)
    found = answer(result)
    assert result.returncode == 0
    assert found["verdict"] == "Declared amp-bf16. No deviations."
    assert found["did"] == ["forward", "backward", "AdamW"]
    assert found["subject"] == "train.py (Sequential)"
    assert result.stderr.splitlines() == ["from the script ['--lr', '0.1']", "step 0"]
    products = [row for row in found["rows"] if row["kind"] == "product"]
    assert {row["module"] for row in products} == {"0", "2"}
    assert {row["source_line"].rpartition(":")[0] for row in products} == {"train.py"}
    assert {tensor["role"] for tensor in found["tensors"]} == {"weights", "gradients", "optimizer"}


def test_text_file_and_exit_code(tmp_path: Path):
    script(tmp_path, LOOP)
    result = receipt("--declared", "fp32", "--fail-on-deviation", "-o", "r.html", "train.py", cwd=tmp_path)
    assert result.returncode == 1
    first, *rest = result.stdout.splitlines()
    assert first == "Declared fp32. 1 deviation in 2 places."
    assert rest[-1] == f"written to {tmp_path / 'r.html'}"
    assert "<h1" in (tmp_path / "r.html").read_text("utf-8")
    result = receipt("train.py", "--declared", "fp32", "-q", "--", "--json", "-o", "x", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr.splitlines()[0] == "from the script ['--json', '-o', 'x']"


@each(
    "body, code, said",
    [
        ("sys.exit(3)", 2, "made no torch.optim.Optimizer in this process"),
        ("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nF.cross_entropy(model(x), y).backward()", 2,
         "whose SGD never stepped"),
        ("torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(x[:, :3])", 2, "The script failed: RuntimeError."),
        ("import os\nos._exit(0)", 2, "The script called os._exit(0)"),
    ],
)  # fmt: skip
def test_scripts_without_a_step_are_reported(body: str, code: int, said: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("script")
    script(folder, body)
    result = receipt("train.py", "--declared", "amp-bf16", cwd=folder)
    assert (result.returncode, result.stdout) == (code, "")
    line = next(line for line in result.stderr.splitlines() if line.startswith("plimsoll: "))
    assert line.startswith("plimsoll: receipt: expected a script with a training step; got one ")
    assert said in line


ONE_STEP = LOOP.replace("range(100)", "range(1)")


@each(
    "body, notes",
    [
        (f"{ONE_STEP}\nsys.exit(4)", "the script exited with 4, after the step"),
        (f"{ONE_STEP}\nimport os\nos._exit(5)", "the script called os._exit(5), after the step"),
        # A script that catches its end is stopped again.
        (LOOP.replace("    optimizer.step()", """
    try:
        optimizer.step()
    except BaseException as error:
        print(type(error).__name__)
"""), ""),
        # A thread trains.
        ("import threading\ndef train():\n" + textwrap.indent(LOOP, "    ")
         + "\nthread = threading.Thread(target=train)\nthread.start()\nthread.join()", ""),
        # A thread waits for ever for one that was stopped.
        ("import threading, queue\nwaiting = queue.Queue()\nthreading.Thread(target=waiting.get).start()\n" + LOOP, ""),
    ],
)  # fmt: skip
def test_scripts_that_end_in_their_own_way(body: str, notes: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("script")
    script(folder, body)
    result = receipt("train.py", "--declared", "amp-bf16", "--json", cwd=folder)
    found = answer(result)
    assert found["verdict"] == "Declared amp-bf16. No deviations."
    assert found["did"] == ["forward", "backward", "AdamW"]
    assert notes in result.stderr


def test_several_optimizers_accumulation_workers_and_skipped_steps(tmp_path: Path):
    script(
        tmp_path,
        """
        judge = nn.Linear(4, 1)
        ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.SGD(judge.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", 2.0**24)
        for batch in torch.utils.data.DataLoader(x.repeat(20, 1), batch_size=8, num_workers=1):
            for optimizer in (ours, theirs):
                for part in batch.split(4):
                    with torch.autocast("cpu", torch.float16):
                        loss = judge(model(part)).float().square().mean()
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
            scaler.update()
            ours.zero_grad(); theirs.zero_grad()
        """,
    )
    found = answer(receipt("train.py", "--declared", "amp-fp16", "--json", cwd=tmp_path))
    assert found["verdict"] == "Declared amp-fp16. No deviations."
    assert {"AdamW", "SGD"} <= {*found["did"]}
    forward = [r for r in found["rows"] if r["kind"] == "product" and r["phase"] == "forward" and r["module"] == "0"]
    assert sum(row["calls"] for row in forward) == 4  # two optimizers, two parts each


def test_a_module_a_folder_and_a_working_folder_that_changes(tmp_path: Path):
    package = tmp_path / "made"
    package.mkdir()
    script(package, "import os\nos.chdir('/')\n" + LOOP, "__main__.py")
    for arguments in (("-m", "made"), ("made",)):
        found = receipt(*arguments, "-o", "r.json", cwd=tmp_path)
        assert found.returncode == 0, found.stderr
        assert json.loads((tmp_path / "r.json").read_text("utf-8"))["declared"] is None
        (tmp_path / "r.json").unlink()


def test_ranks_agree_and_the_first_one_prints(tmp_path: Path):
    script(
        tmp_path,
        """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        """
        + textwrap.indent(LOOP, "        "),
    )
    command = ("-m", "plimsoll", "receipt", "--json", "--declared", "amp-bf16", "train.py")
    first, second = processes.as_ranks([command] * 2, tmp_path, ENVIRONMENT)
    assert second.stdout == ""
    found = answer(first)
    assert found["verdict"] == "Declared amp-bf16. No deviations."
    reduced = [row for row in found["rows"] if row["kind"] == "collective"]
    assert [(row["operation"], row["output"]) for row in reduced] == [("c10d.allreduce_", "fp32")]


def test_a_recorded_run(tmp_path: Path):
    import torch
    from torch import nn

    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pl.watch(model, optimizer, run=tmp_path / "run", every=1):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    result = here("run", "--declared", "amp-fp16", "--fail-on-deviation", "--json", cwd=tmp_path)
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [deviation["kind"] for deviation in found["deviations"]] == ["loss-scale"]
    assert "no single operations" in found["notes"][0]
    assert {row["operation"] for row in found["rows"]} == {"module"}


def test_records_that_are_missing_take_the_exit_code_0_away(tmp_path: Path):
    from plimsoll.runs import RunWriter, Scalars

    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    assert here("run", cwd=tmp_path).exit_code == 0
    next((tmp_path / "run" / "scalars").iterdir()).unlink()
    result = here("run", cwd=tmp_path)
    assert result.exit_code == 2 and "are missing, and the answer is from the rest" in result.stderr


@each(("command", "ending"), [("receipt", "html"), ("probe", "toml")])
def test_a_folder_that_the_script_removes_costs_the_file_and_not_the_answer(command: str, ending: str, tmp_path: Path):
    script(tmp_path, "import shutil\nshutil.rmtree('answers')\n" + textwrap.dedent(LOOP))
    (tmp_path / "answers").mkdir()
    arguments = [command, "train.py", "-o", f"answers/answer.{ending}", "--json"]
    arguments += ["--format", "fp16"] if command == "probe" else []
    result = processes.python("-m", "plimsoll", *arguments, cwd=tmp_path, env=ENVIRONMENT)
    assert (result.returncode, json.loads(result.stdout) != {}) == (2, True), result.stderr
    assert "in a folder that exists" in result.stderr and "Traceback" not in result.stderr


@each(
    "arguments, said",
    [
        (("missing.py",), "got 'missing.py', which is not there"),
        (("train.py", "--fail-on-deviation"), "expected --declared with --fail-on-deviation"),
        (("train.py", "--declared", "bf16"), "got --declared 'bf16', which can mean several"),
        (("train.py", "--declared", "none.toml"), "got 'none.toml', which is not there"),
        (("train.py", "-o", "r.pdf"), "expected --output to end in .html, .json, .md, .txt"),
        (("train.py", "-o", "nowhere/r.HTML"), "expected --output in a folder that exists"),
        (("train.py", "-o", "nowhere/r.md"), "expected --output in a folder that exists"),
        (("empty",), "No Plimsoll run in"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], said: str, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("script")
    script(folder, LOOP)
    (folder / "empty").mkdir()
    result = here(*arguments, cwd=folder)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_declaration_that_does_not_fit_the_model(tmp_path: Path):
    script(tmp_path, LOOP)
    (tmp_path / "plan.toml").write_text('target = "fp8"\n[formats]\nblocks = "bf16"\n', encoding="utf-8")
    result = receipt("train.py", "--declared", "plan.toml", cwd=tmp_path)
    assert result.returncode == 2
    assert "expected each module of the plan to be in the model; got 'blocks'" in result.stderr
