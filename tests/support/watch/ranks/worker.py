"""One rank of test_ranks: ``worker.py FOLDER SCENARIO...`` runs each scenario into a run of its own."""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    from tests.support.watch.ranks import launch, scenarios

    launch.wait_for_each_other()
    try:
        for name in names:
            scenarios.run(name, folder / name)
            dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
