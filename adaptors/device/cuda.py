"""NVIDIA GPUs over NCCL: stopping aborts the communicators, which releases kernels that wait for a dead peer.

Never run on hardware by us; see docs/verified.md.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import host_group
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.processor.progress import ProgressBoard

log = logging.getLogger("mindio_tft_patch.device")


class CudaDevice:
    """A rank that computes on an NVIDIA GPU."""

    name = "cuda"

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self.flag = StopFlag()

    def install(self) -> None:
        """NCCL communicators can be aborted from any thread; only the wait of the main thread must be guessed."""
        self._board.probe_with(HostWait(threading.get_ident()))

    def stop(self) -> None:
        """Abort every NCCL communicator of this process; the main thread's next synchronisation raises.

        The groups stay registered with torch.distributed, so that their store can still serve a new gloo group.
        """
        self.flag.stop()
        cuda = torch.device("cuda")
        # c10d has no public list of groups; `_world.pg_map` is what its own abort walks over.
        for group in list(dist.distributed_c10d._world.pg_map):
            try:
                backend = group._get_backend(cuda)
            except RuntimeError:
                continue  # a gloo-only group
            abort = getattr(backend, "abort", None)
            if abort is not None:
                abort()

    def clean(self) -> None:
        """Kernels of aborted communicators have ended; wait for the rest."""
        torch.cuda.synchronize()

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.cuda.synchronize()

    def gate_group(self) -> Any:
        """NCCL barriers do not wait on the host; gloo's do."""
        return host_group()
