"""`plimsoll probe`: exit codes, and scripts, folders and files as targets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import plimsoll as pl
from plimsoll.cli import app
from tests.support import processes
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"PYTHONWARNINGS", "RANK"}} | {
    "OMP_NUM_THREADS": "1"
}
SCRIPT = """
import sys, torch
from torch import nn
print("from the script", sys.argv[1:])
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.relu(self.first(x)))

model = Net()
with torch.no_grad():
    model.first.weight.mul_(float(sys.argv[-1]))
    model.head.bias.copy_(torch.arange(4.0))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
for step in range(100):
    loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.randint(4, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step)
print("never reached")
"""
NEXT = 'Save the plan (-o plan.toml) and train with pl.prepare(model, optimizer, precision="plan.toml").'


def of_script(folder: Path, *arguments: object, body: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(body, encoding="utf-8")
    return processes.python("-m", "plimsoll", "probe", "train.py", *arguments, cwd=folder, env=ENVIRONMENT)


def here(*arguments: object) -> Any:
    """The command in this process, for what runs no script."""
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "model.pt"
    torch.save({"head.weight": torch.tensor([[1e6, 1.0], [2.0, 3.0]]), "head.bias": torch.zeros(2)}, path)
    return path


def test_a_script_that_fits(tmp_path: Path) -> None:
    result = of_script(tmp_path, "--format", "fp16", "--batches", "3", "-o", "plan.toml", "--lr", "1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "train.py fits FP16: nothing overflows or is lost, in 3 batches.",
        "Plan: 2 modules: 2 in FP16; 16 bits a value.",
        f"Next: {NEXT}",
        f"written to {tmp_path / 'plan.toml'}",
    ]
    assert result.stderr.splitlines() == ["from the script ['--lr', '1']", "step 0", "step 1", "step 2"]
    assert pl.Plan.load(tmp_path / "plan.toml").formats == {"first": "fp16", "head": "fp16"}


def test_a_script_that_does_not(tmp_path: Path) -> None:
    result = of_script(tmp_path, "--format", "fp16", "--json", "1e6")
    found = json.loads(result.stdout)
    assert (result.returncode, found["fits"], found["batches"]) == (1, False, 4)
    overflows = [finding for finding in found["findings"] if finding["rule"] == "overflow"]
    assert {name for finding in overflows for name in finding["where"]} >= {"first.weight", "first:output"}
    assert found["plan"]["modules"]["first"]["forward"] == "bf16"
    assert found["plan"]["source"] == "train.py"


def test_a_script_whose_weights_are_bf16(tmp_path: Path) -> None:
    """Its calls are repeated in FP32. Where its own code casts to BF16, they cannot be."""
    narrow = SCRIPT.replace("model = Net()", "model = Net().bfloat16()")
    body = narrow.replace("torch.randn(8, 16)", "torch.randn(8, 16).bfloat16()")
    result = of_script(tmp_path, "--format", "fp16", "1", body=body)
    assert (result.returncode, result.stdout.splitlines()) == (
        0,
        [
            "train.py fits FP16: nothing overflows or is lost, in 4 batches.",
            "Plan: 2 modules: 2 in FP16; 16 bits a value.",
            f"Next: {NEXT}",
        ],
    ), result.stderr
    body = narrow.replace("self.first(x)", "self.first(x.to(torch.bfloat16))")
    result = of_script(tmp_path, "--format", "fp16", "1", body=body)
    assert result.returncode == 0 and "Traceback" not in result.stderr
    assert "Not judged: decisions. The model failed when its calls were repeated in FP32: RuntimeError" in result.stdout


def test_a_defect_in_the_answer_is_none(tmp_path: Path) -> None:
    """Exit code 1 would say that the model does not fit."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    code = (
        "import sys\n"
        "from plimsoll.cli import main\n"
        "from plimsoll.probing.script_training import ScriptTraining\n"
        "ScriptTraining.answer = lambda self: {}['planted']\n"
        "sys.argv = ['plimsoll', 'probe', 'train.py', '--format', 'fp16', '1']\n"
        "main()"
    )
    done = processes.python("-c", code, cwd=tmp_path, env=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (3, "")
    assert "KeyError: 'planted'\nplimsoll: This is a defect of Plimsoll, and no answer." in done.stderr


def test_a_script_without_a_step_ends_with_2(tmp_path: Path) -> None:
    result = of_script(tmp_path, "--format", "fp16", "1", body=SCRIPT.replace("optimizer.step()", "raise KeyError"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == (
        "plimsoll: probe: expected a script with a training step; got one without: Net was called, but no optimizer "
        "has stepped. The script failed: KeyError."
    )


def test_a_script_that_catches_the_end_is_ended(tmp_path: Path) -> None:
    body = SCRIPT.replace("    loss = nn.", "    try:\n        loss = nn.").replace(
        "torch.randint(4, (8,)))", "torch.randint(4, (8,)))\n    except BaseException:\n        continue"
    )
    result = of_script(tmp_path, "--format", "bf16", "1", body=body.replace("range(100)", "range(10**9)"))
    assert (result.returncode, result.stdout.splitlines()[0]) == (
        0, "train.py fits BF16: nothing overflows or is lost, in 4 batches."
    )  # fmt: skip


def test_weights_and_exit_codes(weights: Path) -> None:
    bad, good = here(weights, "--format", "fp16"), here(weights, "--format", "bf16")
    assert (bad.exit_code, good.exit_code) == (1, 0)
    assert bad.stdout.startswith("The weights of model.pt do not fit FP16: see head.\nalarm: overflow in head.weight: ")
    assert good.stdout.startswith("The weights of model.pt fit BF16: nothing overflows or is lost.\nNot judged: ")
    assert json.loads(here(weights, "--format", "fp16", "--json").stdout)["fits"] is False
    assert here(weights, "--format", "fp16", "-q").stdout == ""


def test_the_command_imports_no_torch_before_the_script() -> None:
    code = (
        "import sys; from plimsoll.cli.commands.choosing import probe; probe._checked('fp8'); probe._file('p.toml'); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


def test_a_plan_that_there_is_not_is_said(weights: Path, tmp_path: Path) -> None:
    result = here(weights, "--format", "bf16", "-o", tmp_path / "plan.toml")
    assert result.exit_code == 0 and not (tmp_path / "plan.toml").exists()
    assert f"no plan was written to {tmp_path / 'plan.toml'}" in result.stderr


@each(
    "arguments, said",
    [
        (["nothing.pt", "--format", "fp16"], "which is not there"),
        (["WEIGHTS", "--format", "fp17"], "probe: expected the name of a number format; got 'fp17'"),
        (["train.py", "--format", "e8m0"], "probe: expected a format for values; got e8m0"),
        (["train.py", "--format", "fp16"], "expected a Python script; got 'train.py', which cannot be read"),
        (["train.py", "--format", "fp16", "--data", "x.pt"], "expected no --data with a script"),
        (["WEIGHTS", "--format", "fp16", "--data", "x.pt"], "expected no data with weights alone"),
        (["WEIGHTS", "--format", "fp16", "more"], "expected no arguments after a model; got 'more'"),
        (["WEIGHTS", "--format", "fp16", "-o", "plan.json"], "plan.json"),
    ],
)
def test_what_cannot_be_read_ends_with_2(arguments: list[str], said: str, weights: Path) -> None:
    result = here(*(str(weights) if word == "WEIGHTS" else word for word in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


def test_a_model_folder_with_data(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        nn.init.constant_(model.model.layers[0].input_layernorm.weight, 1e6)
    model.save_pretrained(tmp_path / "llama")
    torch.save(torch.arange(16).reshape(1, 16), tmp_path / "tokens.pt")
    result = here(tmp_path / "llama", "--format", "fp16", "--data", tmp_path / "tokens.pt", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["batches"] == 1 and found["subject"] == "llama"
    overflows = next(f for f in found["findings"] if f["rule"] == "overflow" and f["collection"] == "activations")
    assert overflows["where"][0].startswith("model.layers.0.self_attn.") and overflows["evidence"]["largest"] > 65504
