"""One rank of test_guard_ranks: ``guard_rank.py STORE RANK WORLD RESULTS`` writes what it saw as JSON."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import plimsoll as pl
from plimsoll.diagnosis import Guard
from plimsoll.diagnosis.guard import guard, step_boundary
from plimsoll.errors import GuardStop
from tests.support.diagnosis.guarded import by_hand, net, scaler_at
from tests.support.patience import HANG_SECONDS
from tests.support.watch.ranks.launch import wait_for_each_other


def train(folder: Path, ranks: str, *, by_look: bool) -> dict[str, Any]:
    """A scale far too low, seen and raised on all ranks at one step."""
    rank = dist.get_rank()
    model = DistributedDataParallel(net())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), scaler_at(1.0)
    watch = pl.watch(model, optimizer, run=folder / f"{ranks}-{by_look}", every=2, ranks=ranks)
    stated: list[str] = []
    options: dict[str, Any] = {"every": 10**6 if by_look else 5, "cpu_share": 1.0, "dry_run": False}
    guard = Guard(watch, ["raise_scale"], lambda f: stated.append(f.rule), scaler=scaler, **options)
    scales = []

    def between(step: int) -> None:
        scales.append(scaler.get_scale())
        if by_look and step == 9:
            guard.look()
        elif not by_look and guard._checker._thread is not None:
            guard._checker._thread.join()

    by_hand(model, optimizer, scaler, range(18), factor=1e-6, between=between)
    found = {
        "scales": scales, "acts": [act.to_dict() for act in guard.acts], "reported": stated,
        "looks": [look.step for look in guard.looks],
        "weights": [p.detach().flatten().tolist() for p in model.parameters()],
    }  # fmt: skip
    dist.barrier()
    watch.close()
    dist.barrier()
    if rank == 0:
        run = pl.Run(folder / f"{ranks}-{by_look}")
        found["events"] = [[event.rank, event.step] for event in run.events() if event.kind == "guard"]
        found["same"] = [list(look.findings) == pl.diagnose(run, until=look.step) for look in guard.looks]
    return found


def stopped(folder: Path) -> dict[str, Any]:
    """One rank's weights break; all end at the same step."""
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = pl.watch(model, optimizer, run=folder / "stopped", every=2)
    reported: list[str] = []
    guard = Guard(watch, ["stop"], dry_run=False, every=10**6, report=lambda run: reported.append(run.name))

    def between(step: int) -> None:
        steps.append(step)
        if step == 5:
            with torch.no_grad():
                model.module.a.weight[0, 0] = torch.nan
        if step == 9:
            guard.look()

    steps: list[int] = []
    message = ""
    try:
        by_hand(model, optimizer, None, range(20), between=between)
    except GuardStop as stop:
        message = str(stop)
    watch.close()
    return {"steps": len(steps), "message": message, "reported": reported}


def main(store: str, rank: int, world: int, results: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wait_for_each_other()
    guard._FLUSH_SECONDS = step_boundary._PATIENCE_SECONDS = HANG_SECONDS
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    folder = results.parent
    seen: dict[str, Any] = {
        "each": train(folder, "each", by_look=True),
        "background": train(folder, "each", by_look=False),
        "reduce": train(folder, "reduce", by_look=True),
        "stopped": stopped(folder),
    }
    results.write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
