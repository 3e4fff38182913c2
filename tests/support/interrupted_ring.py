"""One of four ranks: a reduce-scatter that one rank stays away from is interrupted, then all groups are rebuilt.

    python interrupted_ring.py <rank> <port of the store>

Prints as JSON how many threads and descriptors it had at first and after each round.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.gloo import GlooDevice
from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.progress import ProgressBoard

RANKS, ROUNDS, AWAY = 4, 3, 1


def held() -> list[int]:
    """Threads and descriptors of this process; what ends in a moment is given the moment."""
    time.sleep(0.5)
    return [len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


def main(rank: int, port: int) -> None:
    """Go through the rounds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    group = dist.new_group(list(range(RANKS)))
    device = GlooDevice(ProgressBoard())
    device.install()

    def reduce_scatter() -> None:
        # Large enough that a ring does not fit into what the connections buffer.
        result = torch.zeros(1 << 16)
        dist.reduce_scatter_tensor(result, torch.ones(RANKS << 16), group=group)
        assert bool((result == RANKS).all())

    reduce_scatter()
    seen = [held()]
    for number in range(1, ROUNDS + 1):
        if rank == AWAY:
            time.sleep(0.5)
            device.stop()
        else:
            threading.Timer(0.5, device.stop).start()
            with suppress(Interrupted):
                reduce_scatter()
                raise AssertionError("the reduce-scatter was not interrupted")
        device.flag.acknowledge()
        with device.flag.recovering():
            everyone = list(range(RANKS))
            device.rebuild_groups(number, everyone, deadline=time.monotonic() + 20, check=device.flag.check)
        device.flag.clear()
        reduce_scatter()
        dist.barrier(group=group)  # waits for everything that the group has begun before, also before the rebuild
        seen.append(held())
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
