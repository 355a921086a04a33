"""One of two ranks that train apart: ``dying.py FOLDER PORT RANK WHO``; rank WHO dies before its fourth step."""

import contextlib
import os
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import plimsoll as pl
from plimsoll.watch.ranks import collector, store_channel
from tests.support.patience import HANG_SECONDS
from tests.support.watch.ranks.launch import wait_for_each_other
from tests.support.watch.ranks.models import Net, data, sgd, train


def wait_for_the_end_of(process: int) -> None:
    """Until it is gone: as long as it is there its threads may take a message, and die with it."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)
            time.sleep(0.01)


def main(folder: Path, port: int, rank: int, who: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wait_for_each_other()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = Net()
    optimizer = sgd(model)
    options = {"every": 1, "collect": ("activations",)}
    each = pl.watch(model, optimizer, run=folder / "each", **options)
    reduced = pl.watch(model, optimizer, run=folder / "reduced", ranks="reduce", **options)
    for step in range(6):
        if step == 3:
            assert each.flush() and reduced.flush()
            store.set(f"flushed {rank}", "1")
            store.wait([f"flushed {1 - rank}"])
            if rank == 0:
                assert reduced._session.writer.take_sent(HANG_SECONDS) and reduced.flush()
                store.set("taken", "1")
            store.wait(["taken"])
            if rank == who:
                store.set("dying", str(os.getpid()))
                os._exit(0)
            wait_for_the_end_of(int(store.get("dying")))
        train(model, optimizer, data(1, broken=False))
    # The other is known to be dead: however short the wait for it is, it is not too short.
    store_channel.PATIENCE_SECONDS, collector._END_SECONDS = 0.0, 0.1
    each.close()
    reduced.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
