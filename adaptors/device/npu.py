"""Ascend NPUs over HCCL, by torch_npu's public API (torch_npu.npu.stop_device, restart_device).

Written to the documentation and tested with a stand-in; never run on hardware by us; see docs/verified.md.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import host_group
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.processor.progress import ProgressBoard


def _runtime() -> Any:
    # Imported late: only machines with an NPU have it.
    import torch_npu

    return torch_npu.npu


class NpuDevice:
    """A rank that computes on an Ascend NPU.

    Args:
        index: device index on this node, the local rank.
    """

    name = "npu"

    def __init__(self, index: int, board: ProgressBoard) -> None:
        self._board = board
        self._index = index
        self.flag = StopFlag()

    def install(self) -> None:
        """The runtime can be stopped from any thread; only the wait of the main thread must be guessed."""
        self._board.probe_with(HostWait(threading.get_ident()))

    def stop(self) -> None:
        """The runtime ends running tasks and raises an error containing FORCE STOP in the main thread."""
        self.flag.stop()
        _runtime().stop_device(self._index)

    def clean(self) -> None:
        """Make the stopped device usable again."""
        _runtime().restart_device(self._index)

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.npu.synchronize()

    def gate_group(self) -> Any:
        """HCCL barriers do not wait on the host; gloo's do."""
        return host_group()
