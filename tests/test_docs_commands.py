"""Shell blocks of pages run as pasted, in order, in a project with a training script and the runs they name."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import processes
from tests.support.patience import HANG_SECONDS
from tests.test_shell_blocks import ROOT, shell_blocks, split

PAGES = (
    "README.md",
    "docs/index.md",
    "docs/tutorial/five-minutes.md",
    "docs/tutorial/receipt.md",
    "docs/how-to/backends.md",
    "docs/how-to/ci-gate.md",
    "docs/how-to/report.md",
    "docs/how-to/run-a-script.md",
    "docs/how-to/serve.md",
)
_ELSEWHERE = {"make", "pip", "torchrun", "accelerate"}  # these need a checkout, an index or several processes
_VERDICTS = {"check", "diff", "plan", "receipt"}  # exit code 1 is their answer
Done = subprocess.CompletedProcess[str]
_SCRIPT = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(40):
    x = torch.randn(16, 8)
    loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def shell(line: str, folder: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{processes.commands()}:{os.environ['PATH']}"}
    return subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def carry_out(line: str, folder: Path) -> None:
    """Runs a line to its end; a server, at a free port, until it says where its page is."""
    words = split(line)[0]
    if words[:2] == ["plimsoll", "serve"]:
        with shell(f"exec {shlex.join(words)} --port 0", folder) as server:
            assert server.stdout is not None
            shown = ""
            while "Live page: http" not in shown and (said := server.stdout.readline()):
                shown += said
            server.send_signal(signal.SIGINT)
            shown += server.communicate(timeout=HANG_SECONDS)[0]
        assert "Live page: http" in shown and "Traceback" not in shown, shown
        return
    if words[0] == "plimsoll" and line.partition(" #")[0].split() == words:  # nothing but a comment is the shell's
        done = processes.python("-m", *words, cwd=folder)
        code, shown = done.returncode, done.stdout + done.stderr
    else:
        with shell(line, folder) as process:
            shown = process.communicate(timeout=HANG_SECONDS)[0]
        code = process.returncode
    allowed = {0, 1} if set(words[:2]) & _VERDICTS else {0}
    assert code in allowed and "Traceback" not in shown, f"{line}\n{shown}"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "mypackage").mkdir()
    (folder / "mypackage" / "__init__.py").touch()
    for script in ("train.py", "mypackage/train.py"):
        (folder / script).write_text(_SCRIPT)
    carry_out("plimsoll run -o recorded train.py", folder)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_as_pasted(page: str, project: Path, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    shutil.copytree(project, folder)
    text = (ROOT / page).read_text("utf-8")
    lines = [line for block in shell_blocks(text) for line in block.replace("\\\n", " ").splitlines()]
    mine = [line for line in lines if split(line)[0][0] not in _ELSEWHERE]
    for line in mine:  # the runs that the page speaks of, but for those that its commands record
        named = {word for words in split(line) for word in words if word.startswith("runs/") and word != "runs/"}
        for run in named if " run " not in line else ():
            if not (folder / run).exists():
                shutil.copytree(folder / "recorded", folder / run)
        (folder / "runs").mkdir(exist_ok=True)
        carry_out(line, folder)
    assert mine


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/five-minutes.md"])
def test_the_verdict_shown_is_the_verdict_printed(page: str, tutorial: Mapping[str, Done]) -> None:
    blocks = re.findall(r"^```text\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (shown,) = (block for block in blocks if "Problem:" in block and "alarm  " in block)
    assert " ".join(shown.split()) in " ".join(tutorial["check"].stdout.split())


def test_the_script_of_the_tutorial_gives_the_finding_of_the_page(tutorial: Mapping[str, Done]) -> None:
    page = (ROOT / "docs/tutorial/five-minutes.md").read_text("utf-8")
    shown = re.search(r"^plimsoll check runs/first\n```\n\n```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    ran, checked = tutorial["run"], tutorial["check"]
    assert ran.returncode == 0 and "plimsoll: watching Sequential (85,002 parameters, AdamW)" in ran.stderr
    assert checked.returncode == 1
    assert [line.rstrip() for line in checked.stdout.splitlines()] == shown[1].splitlines()


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Done]:
    """The two commands of the tutorial for newcomers, run with its script."""
    folder = tmp_path_factory.mktemp("five-minutes")
    page = (ROOT / "docs/tutorial/five-minutes.md").read_text("utf-8")
    script = re.search(r"^```python\n(import torch\n.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert script is not None
    (folder / "train.py").write_text(script[1])

    def command(*words: str) -> Done:
        return processes.python("-m", "plimsoll", *words, cwd=folder, env=os.environ | {"COLUMNS": "100"})

    return {"run": command("run", "--output", "runs/first", "train.py"), "check": command("check", "runs/first")}
