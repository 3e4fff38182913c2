"""Waits for every kind of collective with a partner that is away, is stopped, and says how each wait ended (JSON)."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.processor.progress import ProgressBoard

PATIENCE_SECONDS = 5.0  # a wait that has not ended by then will not end
WORKS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda group: group.allreduce([torch.ones(4)]),
    "all_gather": lambda group: group._allgather_base(torch.ones(8), torch.ones(4)),
    "reduce_scatter": lambda group: group._reduce_scatter_base(torch.ones(4), torch.ones(8)),
    "all_to_all": lambda group: group.alltoall_base(torch.ones(4), torch.ones(4), [], []),
    "broadcast": lambda group: group.broadcast(torch.ones(4), 1),
    "barrier": lambda group: group.barrier(),
    "receive": lambda group: group.recv([torch.ones(4)], 1, 0),
}


def connected(name: str) -> list[Any]:
    """Both ranks' ends of a new group; rank 1 never takes part in anything."""
    store, ends = dist.HashStore(), [None, None]

    def connect(rank: int) -> None:
        ends[rank] = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, 2, timedelta(seconds=50))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def main() -> None:
    """Print the outcomes and leave without destroying anything."""
    outcomes: dict[str, str] = {}

    def give_up() -> None:
        time.sleep(PATIENCE_SECONDS * len(WORKS))
        leave()

    def leave() -> None:
        print(json.dumps({**dict.fromkeys(WORKS, "waits on"), **outcomes}), flush=True)
        os._exit(0)

    threading.Thread(target=give_up, daemon=True).start()
    kept = []
    for name, begin in WORKS.items():
        group, partner = connected(name)
        flag = StopFlag()
        waits = InterruptibleWaits(flag, ProgressBoard())
        waits.install()
        work = begin(group)
        kept.append((group, partner, work))
        threading.Timer(0.2, flag.stop).start()
        try:
            work.wait()
            outcomes[name] = "completed"
        except BaseException as error:
            outcomes[name] = type(error).__name__
        waits.uninstall()
    leave()


if __name__ == "__main__":
    main()
