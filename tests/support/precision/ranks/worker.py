"""One rank of test_distributed: ``worker.py FOLDER SCENARIO...`` writes what each scenario returns on this rank."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    from tests.support.precision.ranks import scenarios

    try:
        for name in names:
            torch.save(getattr(scenarios, name)(), folder / f"{name}.{dist.get_rank()}.pt")
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
