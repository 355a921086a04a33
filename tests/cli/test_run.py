"""`plimsoll run`: scripts run as under plain Python, and what they train is recorded."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import plimsoll
from plimsoll.cli.commands import run as _run
from plimsoll.runs import Run
from plimsoll.watch import settings
from tests.support import processes
from tests.support.patience import HANG_SECONDS

SCRIPTS = Path(__file__).parent / "scripts"
ALL = {"weights", "gradients", "activations", "activation_gradients", "optimizer", "updates"}
# The script's own warnings are its own; threads that spin would take the cores of other workers.
UNSET = {"PYTHONWARNINGS", "RANK", "PLIMSOLL_QUIET"}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNSET} | {"OMP_NUM_THREADS": "1"}
Start = Callable[..., subprocess.CompletedProcess[str]]
PATHS = f"{os.environ['PYTHONPATH']}{os.pathsep}" if os.environ.get("PYTHONPATH") else ""


def fresh(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process from its very start."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT | environment, timeout=HANG_SECONDS,
    )  # fmt: skip


def python(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return processes.python(*arguments, cwd=cwd, env=ENVIRONMENT | environment, forks=True)


def watched(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "plimsoll", "run", *arguments, cwd=cwd, **environment)


# The lines at the end: the verdicts, and the command for the details.
ENDING = re.compile(r"plimsoll: (.*: )?(Healthy|Warning|Problem)\b|; (for details:|several ranks: ask) plimsoll check")


def said(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Plimsoll's lines, without those at the end."""
    return [line for line in result.stderr.splitlines() if line.startswith("plimsoll") and not ENDING.search(line)]


def theirs(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in result.stderr.splitlines() if not line.startswith("plimsoll")]


def same(cwd: Path, *arguments: object, start: Start = fresh, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script both ways and compares all that can be seen of it."""
    alone = start(*arguments, cwd=cwd, **environment)
    run = start("-m", "plimsoll", "run", *arguments, cwd=cwd, **environment)
    assert (run.returncode, run.stdout, theirs(run)) == (alone.returncode, alone.stdout, theirs(alone))
    return run


# -- as under plain Python


@pytest.mark.parametrize("form", ["absolute", "relative", "link", "module", "folder"])
def test_a_script_finds_all_as_it_is_without(form: str, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("plain.py", "__main__.py"):
        (tmp_path / "below" / name).write_text((SCRIPTS / "plain.py").read_text("utf-8"))
    (tmp_path / "link.py").symlink_to("below/plain.py")
    target = {
        "absolute": [tmp_path / "below/plain.py"],
        "relative": ["./below/../below/plain.py"],
        "link": ["link.py"],
        "module": ["-m", "below.plain"],
        "folder": ["below"],
    }[form]
    # Python itself cannot import a folder's __main__.py again in a process that it spawns.
    methods = "" if form == "folder" else "spawn forkserver"
    result = same(tmp_path, *target, "--every", "3", "-m", "--", "--help", "", START_METHODS=methods)
    assert result.returncode == 5
    assert "'--every', '3', '-m', '--', '--help', ''" in result.stdout and "goodbye" in result.stdout
    assert all(f"{method} [2]" in result.stdout for method in methods.split())
    assert said(result) == ["plimsoll: no training step was seen: the script has not imported torch"]


def test_exit_messages_pass_through(tmp_path: Path) -> None:
    result = same(tmp_path, SCRIPTS / "plain.py", EXIT_WITH="the disk is gone")
    assert result.returncode == 1 and theirs(result) == ["the disk is gone"]


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("def f():\n    try:\n        int('x')\n    except ValueError as e:\n        raise KeyError(3) from e\nf()", 1),
        ("print(1)\nx = = 2", 1),
        ("import sys\nsys.excepthook = lambda *a: print('hook', a[0].__name__, a[2].tb_lineno)\n1 / 0", 1),
        ("import sys\ndef hook(*a): raise OSError('no')\nsys.excepthook = hook\n1 / 0", 1),
        ("raise ExceptionGroup('two', [ValueError(1), TypeError(2)])", 1),
        ("import plimsoll as pl\npl.formats.get('fp17')", 1),
        ("import atexit, signal\natexit.register(print, 'bye')\nsignal.raise_signal(signal.SIGINT)", -signal.SIGINT),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os\nos._exit(9)", 9),
        ("raise BrokenPipeError(32, 'pipe')", 1),
        ("import threading\nthreading.Timer(0.1, print, ['late']).start()", 0),
    ],
)
def test_a_script_ends_as_it_does_without(source: str, status: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(source)
    assert same(tmp_path, "script.py").returncode == status


def test_a_module_that_is_not_there_is_python_s_own_message(tmp_path: Path) -> None:
    assert same(tmp_path, "-m", "no_such_module").returncode == 1


def test_torch_is_imported_by_the_script_and_not_before(tmp_path: Path) -> None:
    source = "import os, sys\nassert 'torch' not in sys.modules\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n"
    (tmp_path / "script.py").write_text(source + "print(torch.get_num_threads())")
    result = same(tmp_path, "script.py", OMP_NUM_THREADS="2")
    assert (result.returncode, result.stdout) == (0, "1\n")
    (line,) = said(result)
    assert line.startswith("plimsoll: no training step was seen: no torch.optim.Optimizer was made in this process")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_a_script_from_a_pipe_is_run_whole(tmp_path: Path) -> None:
    """As the shell's ``plimsoll run <(...)`` gives it: what was read of it is gone."""
    pipe = tmp_path / "script"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("print('a')\nprint('b')\n",), daemon=True)
    writer.start()
    result = watched(pipe, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "a\nb\n"), result.stderr


# -- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--every", "0"], "--every"),
        (["--warmup", "-1"], "--warmup"),
        (["--collect", "weights,loss"], "expected --collect to name some of weights, .*; got 'loss'"),
        (["--collect", "weights=often"], "expected --collect weights=N .*; got weights=often"),
        (["--collect", "weights=1,gradients,weights"], "expected --collect to name each collection once; got weights"),
        (["--collect", f"weights={'9' * 5000}"], "expected --collect weights=N"),
        (["--recorder", "everything"], "expected --recorder to name some of loss, .*; got 'everything'"),
        (["--precision", "fp16-master"], "expected --precision to be .*; got .fp16-master."),
    ],
)
def test_a_wrong_option_ends_it_before_the_script_starts(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('started')")
    result = watched(*options, "script.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert re.search(message, result.stderr)


def test_a_script_that_is_not_there_is_a_message_and_status_2(tmp_path: Path) -> None:
    result = watched("train.py", cwd=tmp_path)
    assert result.returncode == fresh("train.py", cwd=tmp_path).returncode == 2
    assert result.stderr == (
        "plimsoll: run: expected a Python script; got 'train.py', which cannot be read (No such file or directory). "
        "Give its path, or -m and the name of a module.\n"
    )


def test_the_names_it_takes_are_those_of_watch() -> None:
    assert (_run.COLLECTIONS, _run.FACTS) == (settings.COLLECTIONS, settings.FACTS)
    assert _run.BLOCKS == settings.BLOCKS


# -- what is trained is recorded


def test_a_plain_loop_is_recorded_and_trains_the_same_to_the_bit(tmp_path: Path) -> None:
    result = same(tmp_path, SCRIPTS / "mnist.py", "--every", "0.05", start=python)
    assert result.returncode == 0 and result.stdout.count("loss 0x") == 6
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"mnist-\d{8}-\d{6}", folder.name)
    assert said(result) == [f"plimsoll: watching Net (1,050 parameters, SGD), every 10 steps, into runs/{folder.name}"]
    run = Run(folder)
    assert run.closed and run.problems == [] and run.steps == [0]
    assert set(run.tensors) == ALL
    assert {"model:input", "model:output", "conv:output", "fc:input"} <= set(run.tensors["activations"])
    losses = [float.fromhex(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]
    steps, values = run.scalars("loss")
    assert steps.tolist() == list(range(6)) and values.tolist() == losses


def test_the_options_reach_the_watch(tmp_path: Path) -> None:
    options = ["--output", "here/it is", "--collect", "gradients=2,weights", "--every", "4", "--include", "fc",
               "--include", "conv", "--exclude", "*.bias", "--warmup", "1", "--recorder", "loss"]  # fmt: skip
    result = watched(*options, SCRIPTS / "mnist.py", cwd=tmp_path)
    schedule = "gradients every 2 steps, weights every 4 steps"
    assert said(result) == [f"plimsoll: watching Net (1,050 parameters, SGD), {schedule}, into here/it is"]
    run = Run(tmp_path / "here/it is")
    assert run.tensors == dict.fromkeys(("gradients", "weights"), ("conv.weight", "fc.weight"))
    assert run.series("gradients", "fc.weight", "count")[0].tolist() == [0, 2, 4]
    assert run.series("weights", "fc.weight", "count")[0].tolist() == [0, 4]
    assert run.scalar_names == ("loss",)
    assert run.settings["warmup"] == 1 and run.settings["recorder"] == ["loss"]


def test_a_second_training_goes_into_a_numbered_folder_and_each_end_names_its_own(tmp_path: Path) -> None:
    script, out = SCRIPTS / "mnist.py", ("--output", "runs/my first")
    ends = [watched(*out, script, cwd=tmp_path).stderr.splitlines()[-1] for _ in range(2)]
    for end, name in zip(ends, ("runs/my first", "runs/my first-2"), strict=True):
        assert end == f"plimsoll: recorded into {name}; for details: plimsoll check '{name}'"
    resumed = watched(*out, "--resume", script, cwd=tmp_path)
    assert said(resumed)[0].endswith("into runs/my first")
    assert [Run(tmp_path / "runs" / name).scalars("loss")[0][-1] for name in ("my first", "my first-2")] == [11, 5]
    third = watched(*out, script, cwd=tmp_path)
    holds = "plimsoll: runs/my first holds the run of another training: this one is recorded into runs/my first-3"
    assert said(third)[0] == f"{holds} (--resume continues it)"


SWALLOWED = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 4).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8).bfloat16()).float().square().mean().backward()
    optimizer.step()
print("trained")
sys.exit(int(*sys.argv[1:]) if sys.argv[1:] else 0)
"""


def test_the_end_of_a_script_is_the_verdict_and_the_next_command(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SWALLOWED, encoding="utf-8")
    result = watched("-o", "run", "train.py", "3", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (3, "trained\n")
    verdict, command = result.stderr.splitlines()[-2:]
    assert verdict.startswith(
        "plimsoll: Problem: steps leave up to 100 % of the weights of 2 tensors unchanged since step 0"
    )
    assert command == "plimsoll: recorded into run; for details: plimsoll check run"
    checked = python("-m", "plimsoll", "check", "run", cwd=tmp_path, COLUMNS="1000")
    assert verdict.removeprefix("plimsoll: ") == checked.stdout.splitlines()[1]


def test_the_end_is_json_or_silent_if_asked_for(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SWALLOWED, encoding="utf-8")
    result = watched("-o", "run", "--json", "train.py", cwd=tmp_path)
    script, answer = result.stdout.splitlines()
    data = json.loads(answer)
    assert script == "trained" and data["run"] == "run"
    assert [(each["run"], each["state"]) for each in data["runs"]] == [("run", "alarm")]
    assert data["runs"][0]["verdict"].startswith("Problem: steps leave up to 100 %") and not ENDING.search(
        result.stderr
    )
    for quiet, environment in ((["-q"], {}), ([], {"PLIMSOLL_QUIET": "1"})):
        result = watched("-o", "quiet", *quiet, "train.py", cwd=tmp_path, **environment)
        assert (result.returncode, result.stdout) == (0, "trained\n") and not ENDING.search(result.stderr)
    assert watched("-q", "-o", "quiet", "train.py", cwd=tmp_path).stderr == ""


@pytest.mark.parametrize("fault", ["raise MemoryError('no room')", "return None"])
def test_a_verdict_that_cannot_be_had_costs_one_line(fault: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SWALLOWED, encoding="utf-8")
    code = (
        "import runpy, sys\nimport plimsoll.display\n"
        f"def function(name):\n    def fails(folder):\n        {fault}\n    return fails\n"
        "plimsoll.display.function = function\nsys.argv = ['plimsoll', 'run', '-o', 'run', 'train.py']\n"
        "runpy.run_module('plimsoll', run_name='__main__', alter_sys=True)\n"
    )
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 0 and "Problem" not in result.stderr and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "plimsoll: recorded into run; for details: plimsoll check run"


GAN = """
import torch
from torch import nn
G, D = nn.Linear(4, 8), nn.Linear(8, 1)
g, d = (torch.optim.Adam(m.parameters()) for m in (G, D))
for _ in range(3):
    fake = G(torch.randn(4, 4))
    d.zero_grad(); D(fake.detach()).mean().backward(); d.step()
    g.zero_grad(); D(fake).mean().backward(); g.step()
"""


def test_the_models_of_a_script_are_listed_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "gan.py").write_text(GAN, encoding="utf-8")
    for name in ("gan", "gan-2"):
        result = watched("--output", "gan", "gan.py", cwd=tmp_path)
        *_, d, g, last = result.stderr.splitlines()
        assert d.startswith(f"plimsoll: {name}/G: ") and g.startswith(f"plimsoll: {name}/D: "), result.stderr
        assert last == f"plimsoll: recorded into {name}; for details: plimsoll check {name}"
        assert json.loads((tmp_path / name / "script.json").read_text("utf-8"))["runs"] == ["G", "D"]
        assert all(Run(tmp_path / name / model).closed for model in "GD")
    checked = python("-m", "plimsoll", "check", "gan", "--json", cwd=tmp_path)
    assert checked.returncode == 0 and [each["model"] for each in json.loads(checked.stdout)["runs"]] == ["G", "D"]


def test_a_script_with_hugging_face_s_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = watched("--every", "1", "--output", "run", SCRIPTS / "hf_trainer.py", cwd=tmp_path)
    assert result.returncode == 0 and "trained 3" in result.stdout, result.stderr
    assert said(result) == ["plimsoll: watching GPT2LMHeadModel (7,520 parameters, AdamW), every step, into run"]
    run = Run(tmp_path / "run")
    assert run.steps == run.scalars("loss")[0].tolist() == [0, 1, 2] and set(run.tensors) == ALL
    assert "transformer.h.1.mlp.c_fc:output" in run.tensors["activations"]
    assert "transformer.h.1.mlp.c_fc.weight:exp_avg_sq" in run.tensors["optimizer"]


def test_a_script_with_lightning_whose_parts_are_called(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    result = watched("--every", "1", "--output", "run", SCRIPTS / "lightning_script.py", cwd=tmp_path)
    assert result.returncode == 0 and "trained 4" in result.stdout, result.stderr
    assert said(result) == ["plimsoll: watching Classifier (195 parameters, Adam), every step, into run"]
    run = Run(tmp_path / "run")
    # The first forward runs inside the first optimizer step, and is recorded all the same.
    assert run.steps == run.scalars("loss")[0].tolist() == [0, 1, 2, 3] and set(run.tensors) == ALL
    assert run.series("activations", "head:output", "count")[1].tolist() == [24] * 4


def test_a_script_with_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = watched(
        "--every", "1", "--output", "run", "-m", "accelerate_script", cwd=tmp_path, PYTHONPATH=PATHS + str(SCRIPTS)
    )
    assert result.returncode == 0 and "trained 2" in result.stdout, result.stderr
    assert said(result) == ["plimsoll: watching Sequential (195 parameters, AdamW), every step, into run"]
    run = Run(tmp_path / "run")
    assert run.steps == [0, 1] and set(run.tensors) == ALL


def test_a_script_that_fails_leaves_a_run_that_says_why(tmp_path: Path) -> None:
    result = watched("--every", "1", SCRIPTS / "crash.py", cwd=tmp_path)
    alone = python(SCRIPTS / "crash.py", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (alone.returncode, alone.stdout) == (1, result.stdout)
    assert theirs(result)[-3:] == alone.stderr.splitlines()[-3:]
    package = str(Path(plimsoll.__file__).parent)
    assert not [line for line in theirs(result) if package in line]  # no frame of Plimsoll's; the clone has its name
    (folder,) = (tmp_path / "runs").iterdir()
    run = Run(folder)
    assert run.closed and run.steps[:2] == [0, 1]
    (event,) = [event for event in run.events() if event.kind == "trigger"]
    assert (event.step, event.message) == (2, "RuntimeError: the data are used up")


def test_ranks_under_torchrun_write_one_run(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = python(*torchrun, "-m", "plimsoll", "run", "--every", "1", SCRIPTS / "ddp.py", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert said(result) == [f"plimsoll: watching Sequential (195 parameters, SGD), every step, into runs/{folder.name}"]
    name = f"runs/{folder.name}"
    assert [line for line in result.stderr.splitlines() if ENDING.search(line)] == [
        f"plimsoll: recorded into {name}; several ranks: ask plimsoll check {name}"
    ]
    run = Run(folder)
    assert run.closed and run.problems == [] and run.ranks == [0, 1] and run.steps == [0, 1, 2]
    assert run.spectrum("activations", "0:input", 0).count == 2 * 4 * 8
    assert run.spectrum("weights", "0.weight", 0).count == 8 * 16
