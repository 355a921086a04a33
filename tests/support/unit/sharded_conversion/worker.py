"""One rank of test_sharded: ``worker.py FOLDER`` trains a converted model, sharded by its blocks."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import plimsoll as pl
from plimsoll.unit.optim.parameter_kinds import kinds_of
from tests.support.unit.sharded_conversion.problem import batch, converted


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    try:
        model = converted()
        for block in model.get_submodule("blocks"):
            fully_shard(block)
        fully_shard(model)
        optimizer, losses = pl.unit.optim.AdamW(model, lr=0.2), []
        for _ in range(3):
            optimizer.zero_grad()
            mine = {name: x[dist.get_rank() :: 2] for name, x in batch().items()}
            loss = model(**mine)[0]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found = {
            "losses": losses,
            "weights": {name: p.full_tensor() for name, p in model.state_dict().items()},
            "kinds": kinds_of(model),
            "sharded": all(type(p).__name__ == "DTensor" for p in model.parameters()),
        }
        model.reset_parameters()
        found["again"] = {name: p.full_tensor() for name, p in model.state_dict().items()}
        torch.save(found, folder / f"{dist.get_rank()}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
