"""What must work where Plimsoll is installed with its core dependencies alone, or with one extra: smoke.py [EXTRA]."""

import importlib.util
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

OPTIONAL = (
    "plotly", "fastapi", "uvicorn", "tensorboard", "wandb", "mlflow", "lightning", "transformers", "duckdb", "ray",
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
    for command in (["check", str(run.path)], ["whatif", str(run.path), "--format", "bf16"], ["doctor"], ["lab"]):
        subprocess.run([sys.executable, "-m", "plimsoll", *command], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "plimsoll", "report", str(run.path)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 2 and "plimsoll[report]" in said.stderr, said.stderr
    print(f"import plimsoll: {seconds_beyond_torch() * 1e3:.1f} ms beyond torch")


def report(folder: Path) -> None:
    import plimsoll as pl

    assert "Plotly" in Path(pl.report.html(trained(folder / "run"), folder / "page.html")).read_text()


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

    trained(folder / "run", sinks=[WandB("smoke", mode="offline", dir=folder)])


def mlflow(folder: Path) -> None:
    from plimsoll.runs import MLflow

    trained(folder / "run", sinks=[MLflow("smoke", tracking_uri=f"sqlite:///{folder}/mlflow.db")])


def lightning(folder: Path) -> None:
    from plimsoll.integrations.lightning import WatchCallback

    WatchCallback(folder / "run")


def transformers(folder: Path) -> None:
    from plimsoll.integrations.transformers import WatchCallback

    WatchCallback(folder / "run")


def sql(folder: Path) -> None:
    import duckdb

    run = trained(folder / "run")
    ((count,),) = duckdb.sql(f"select count(*) from read_parquet('{run}/**/*.parquet', union_by_name=true)").fetchall()
    assert count > 0


def sweep(_: Path) -> None:
    from plimsoll.lab._engines import carry_out_on

    assert carry_out_on("ray", "json:dumps", [{"a": 1}], device="cpu") == ['{"a": 1}']


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (core, report, serve, tensorboard, wandb, mlflow, lightning, transformers, sql, sweep)
}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "core"
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        CHECKS[name](Path(made))
    print(f"{name}: works, {time.perf_counter() - began:.0f} s")
