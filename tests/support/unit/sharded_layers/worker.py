"""One rank of test_sharded: ``worker.py FOLDER`` trains a sharded model and writes what became of it."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from plimsoll.unit.optim import AdamW
from plimsoll.unit.optim.parameter_kinds import kinds_of
from tests.support.unit.sharded_layers.problem import EPS, batch, loss_of, network


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        model = network()
        for layer in model.body.layers:
            fully_shard(layer)
        fully_shard(model)
        optimizer = AdamW(model, lr=0.1, weight_decay=0.001, eps=EPS)
        for step in range(3):
            tokens = batch(step)[dist.get_rank() :: 2]
            optimizer.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
        found = {
            "weights": {name: p.full_tensor() for name, p in model.state_dict().items()},
            "kinds": kinds_of(model),
            "factors": [(g["kind"], g["lr_factor"], len(g["params"])) for g in optimizer.param_groups],
            "sharded": all(type(p).__name__ == "DTensor" for p in model.parameters()),
        }
        torch.save(found, folder / f"{dist.get_rank()}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
