"""One of four ranks: a reduce-scatter that one rank stays away from is interrupted, then all groups are rebuilt.

    python interrupted_ring.py <rank> <port of the store>

Each rank has a forked child, as one with data-loader workers has, that holds on to the connections it has inherited;
and somebody goes on referring to the work that was cut off. Prints as JSON how many threads it had at first and after
each round.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.gloo import GlooDevice
from mindio_tft_patch.adaptors.orphans import die_with_parent
from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.progress import ProgressBoard

RANKS, ROUNDS, AWAY = 4, 3, 1


class Ring:
    """The group of all ranks, on one of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._group = dist.new_group(list(range(RANKS)))
        self._device = GlooDevice(ProgressBoard())
        self._device.install()
        self._kept: list[Any] = []

    def reduce_scatter(self) -> None:
        """Together with the others. Large enough that a ring does not fit into what the connections buffer."""
        result = torch.zeros(1 << 16)
        work = dist.reduce_scatter_tensor(result, torch.ones(RANKS << 16), group=self._group, async_op=True)
        self._kept.append(work)
        work.wait()
        assert bool((result == RANKS).all())

    def interrupt_and_rebuild(self, number: int) -> None:
        """One rank stays away; afterwards all is as before."""
        device = self._device
        timer = threading.Timer(0.5, device.stop)
        timer.start()
        if self._rank != AWAY:
            # A rank that was quick to give up has hung up perhaps, before this one was told to stop.
            with suppress(Interrupted, RuntimeError):
                self.reduce_scatter()
                raise AssertionError("the reduce-scatter was not interrupted")
        timer.join()
        device.flag.acknowledge()
        with device.flag.recovering():
            everyone = list(range(RANKS))
            device.rebuild_groups(number, everyone, deadline=time.monotonic() + 20, check=device.flag.check)
        device.flag.clear()
        self.reduce_scatter()
        dist.barrier(group=self._group)  # waits for everything that the group has begun, also before the rebuild


@contextmanager
def forked_child() -> Iterator[None]:
    """A process that has inherited every descriptor of this one."""
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def threads() -> int:
    """Of this process; those that end in a moment are given the moment."""
    time.sleep(0.5)
    return len(os.listdir("/proc/self/task"))


def main(rank: int, port: int) -> None:
    """Go through the rounds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=30))
    ring = Ring(rank)
    ring.reduce_scatter()
    with forked_child():
        seen = [threads()]
        for number in range(1, ROUNDS + 1):
            ring.interrupt_and_rebuild(number)
            seen.append(threads())
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
