"""What must work where Plimsoll is installed with its core dependencies alone, or with one extra: smoke.py [EXTRA]."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

OPTIONAL = (
    "plotly", "fastapi", "uvicorn", "tensorboard", "wandb", "mlflow", "lightning", "transformers", "duckdb",
)  # fmt: skip


def seconds_beyond_torch() -> float:
    """How long `import plimsoll` takes in a fresh interpreter that has torch already; the median of five."""
    code = "import time, torch; t = time.perf_counter(); import plimsoll; print(time.perf_counter() - t)"
    found = [float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5)]
    return sorted(found)[2]


def trained(run: Path, **settings: object) -> Path:
    """A run of a few steps."""
    import torch

    import plimsoll as pl

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with pl.watch(model, optimizer, run=run, every=1, **settings):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
    return run


def core(folder: Path) -> None:
    """Watching, judging, casting and the command; what is not installed is said with its install line."""
    import torch

    import plimsoll as pl

    there = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert not there, f"expected core dependencies alone; got {there}"
    run = pl.Run(trained(folder / "run"))
    assert len(run.steps) == 5 and pl.cast(torch.tensor([1.1]), "e4m3").item() == 1.125
    pl.diagnose(run), pl.whatif(run, "fp16")
    for command in (["check", str(run.path)], ["whatif", str(run.path), "--format", "bf16"], ["doctor"]):
        subprocess.run([sys.executable, "-m", "plimsoll", *command], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "plimsoll", "lab", "demo", "--full"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 2 and "pip install -e ./lab" in said.stderr, said.stderr
    command = [sys.executable, "-m", "plimsoll", "report", str(run.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 2 and "plimsoll[report]" in said.stderr, said.stderr
    print(f"import plimsoll: {seconds_beyond_torch() * 1e3:.1f} ms beyond torch")


def report(folder: Path) -> None:
    import plimsoll as pl

    assert "Plotly" in Path(pl.report.html(trained(folder / "run"), folder / "page.html")).read_text(encoding="utf-8")


def serve(folder: Path) -> None:
    trained(folder / "runs" / "one")
    command = [sys.executable, "-m", "plimsoll", "serve", str(folder / "runs"), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        killer = threading.Timer(120, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            address = next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            assert b"plimsoll" in urllib.request.urlopen(address, timeout=60).read().lower()
        finally:
            killer.cancel()
            process.kill()


def tensorboard(folder: Path) -> None:
    trained(folder / "run", sinks=["tensorboard"])
    assert list(folder.rglob("events.out.tfevents*"))


def wandb(folder: Path) -> None:
    from plimsoll.runs import WandB

    run = trained(folder / "run", sinks=[WandB("smoke", mode="offline", dir=folder)])
    (stored,) = folder.rglob("run-*.wandb")
    assert stored.stat().st_size > 10_000 and not switched_off(run)


def mlflow(folder: Path) -> None:
    """With the store that MLflow chooses itself, a database; the sink's numbers are read back."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.chdir(folder)
    from mlflow.tracking import MlflowClient

    from plimsoll.runs import MLflow

    sink = MLflow("smoke")
    run = trained(folder / "run", sinks=[sink])
    history = MlflowClient().get_metric_history(sink.run_id, "weights/0.weight/norm")
    assert [metric.step for metric in history] == [0, 1, 2, 3, 4] and not switched_off(run)


def switched_off(run: Path) -> list[str]:
    """What a sink said that failed: training goes on without it."""
    import plimsoll as pl

    return [event.message for event in pl.Run(run).events() if "switched off" in event.message]


def lightning(folder: Path) -> None:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    import plimsoll as pl
    from plimsoll.integrations.lightning import WatchCallback

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.DataLoader(torch.randn(12, 8), batch_size=4)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        callbacks=[WatchCallback(folder / "run", every=1)],
    )  # fmt: skip
    trainer.fit(Task(), data)
    assert list(pl.Run(folder / "run").steps) == [0, 1, 2]


def transformers(folder: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import plimsoll as pl
    from plimsoll.integrations.transformers import WatchCallback

    tokens = torch.arange(8)
    arguments = TrainingArguments(
        output_dir=str(folder / "trained"), max_steps=3, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2))
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    Trainer(
        model=model, args=arguments, train_dataset=data, callbacks=[WatchCallback(folder / "run", every=1)]
    ).train()  # fmt: skip
    assert list(pl.Run(folder / "run").steps) == [0, 1, 2]


def sql(folder: Path) -> None:
    import duckdb

    run = trained(folder / "run")
    ((count,),) = duckdb.sql(f"select count(*) from read_parquet('{run}/**/*.parquet', union_by_name=true)").fetchall()
    assert count > 0


def lab(_: Path) -> None:
    """The list of experiments."""
    subprocess.run([sys.executable, "-m", "plimsoll", "lab"], check=True, stdout=subprocess.DEVNULL)


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (core, report, serve, tensorboard, wandb, mlflow, lightning, transformers, sql, lab)
}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "core"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        CHECKS[name](Path(made))
    print(f"{name}: works, {time.perf_counter() - began:.0f} s")
