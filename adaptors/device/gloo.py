"""CPU ranks over gloo: stopping is a flag that every wait looks at (see waits.py)."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.processor.progress import ProgressBoard


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
