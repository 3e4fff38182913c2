"""CPU ranks over gloo: stopping is a flag that every wait looks at (see waits.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device import regroup
from mindio_tft_patch.adaptors.device.connections import hang_up
from mindio_tft_patch.adaptors.device.interface import renew_in_place
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.processor.progress import ProgressBoard

log = logging.getLogger("mindio_tft_patch.rebuild")


class GlooDevice:
    """A rank that computes on the CPU."""

    name = "cpu"

    def __init__(self, board: ProgressBoard) -> None:
        self.flag = StopFlag()
        self._waits = InterruptibleWaits(self.flag, board)

    def install(self) -> None:
        """Make this thread's collectives interruptible."""
        self._waits.install()

    def stop(self) -> None:
        """Raise the flag."""
        self.flag.stop()

    def clean(self) -> None:
        """Nothing: pending gloo works keep their tensors alive and are dropped with their groups."""

    def synchronize(self) -> None:
        """CPU work is done when it returns."""

    def gate_group(self) -> Any:
        """The default group is gloo already; its barrier waits on the host."""
        return dist.group.WORLD

    def host_waits(self) -> AbstractContextManager[None]:
        """Every wait can be interrupted."""
        return nullcontext()

    def in_place_refusal(self) -> str:
        """From torch 2.14 on gloo rebuilds groups in place."""
        return regroup.missing_support()

    def rebuild_groups(
        self, attempt: int, members: Sequence[int], *, deadline: float, check: Callable[[], None]
    ) -> int:
        """By torch's ProcessGroup.reconfigure.

        First the old connections are ended, so that nothing waits on them any more: a barrier waits for whatever its
        group has begun before, and stuck works keep the group's few threads.
        """
        log.info("%d connections ended", hang_up())
        return regroup.rebuild_groups(attempt, members, deadline=deadline, check=check)

    def renew(self, storage: torch.UntypedStorage) -> None:
        """Host memory."""
        renew_in_place(storage)

    def describe_memory_fault(self, error: BaseException) -> str:
        """Host memory has no such errors that a process lives to tell."""
        return ""
