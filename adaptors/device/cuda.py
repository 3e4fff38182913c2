"""NVIDIA GPUs over NCCL: stopping aborts the communicators, which releases kernels that wait for a dead peer.

torch 2.14 has two implementations of the backend "nccl". The one that it takes by itself cannot be rebuilt in place;
the one that it takes with TORCH_DIST_USE_NCCL2=1 can (from NCCL 2.28 on). torch chooses when it registers the backend,
so the choice is known before training, when there are no groups to ask yet.

Never run on hardware by us; see docs/verified.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.adaptors.device import regroup
from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import host_group, renew_in_place
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard

log = logging.getLogger("mindio_tft_patch.device")

_NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
_NCCL2_FROM = (2, 28)
# NCCL connects every member of a group to its neighbours, over the network; gloo's ten seconds are short for that.
_GROUP_SECONDS = 60.0


class CudaDevice:
    """A rank that computes on an NVIDIA GPU."""

    name = "cuda"

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self.flag = StopFlag()
        self._waits = InterruptibleWaits(self.flag, board, everywhere=False)

    def install(self) -> None:
        """NCCL communicators can be aborted from any thread; only the wait of the main thread must be guessed."""
        self._board.probe_with(HostWait(threading.get_ident()))
        self._waits.install()

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

    def host_waits(self) -> AbstractContextManager[None]:
        """Stopping the device does not end a wait on the host."""
        return self._waits.on_host()

    def in_place_refusal(self) -> str:
        """Whether the groups that torch is going to make can be rebuilt; see the top of this file."""
        missing = regroup.missing_support()
        if missing:
            return missing
        if not _nccl_is_second():
            return (
                "torch's NCCL groups cannot be rebuilt in place unless torch uses its second implementation of them "
                f"(set {_NCCL2_VARIABLE}=1)"
            )
        version = torch.cuda.nccl.version()
        if version < _NCCL2_FROM:
            return f"NCCL {'.'.join(map(str, version))} cannot rebuild groups in place (from 2.28 on)"
        return ""

    def rebuild_groups(
        self, attempt: int, members: Sequence[int], *, deadline: float, check: Callable[[], None]
    ) -> int:
        """By torch's ProcessGroup.reconfigure, NCCL and gloo alike."""
        missing = regroup.unsupported(regroup.backends)
        if missing:
            # Groups that user code has made with a backend of its own choice.
            raise RecoveryError("rebuild", f"the backend of process groups {missing} cannot be rebuilt in place")
        return regroup.rebuild_groups(
            attempt, members, deadline=deadline, check=check, parts=regroup.backends, group_seconds=_GROUP_SECONDS
        )

    def renew(self, storage: torch.UntypedStorage) -> None:
        """The caching allocator takes the memory back at once. A GPU with a broken page does not hand it out again."""
        renew_in_place(storage)

    def describe_memory_fault(self, error: BaseException) -> str:
        """Nothing: after an uncorrectable error CUDA's context is lost, and the process with it."""
        return ""


def _nccl_is_second() -> bool:
    """Does the backend "nccl" stand for torch's second implementation?"""
    register = getattr(c10d.Backend, "_ensure_backend_registered", None)
    second = getattr(c10d, "_create_nccl2_process_group", None)
    if register is None or second is None:
        return False
    register("nccl")  # what making the first group does
    plugin = c10d.Backend._plugins.get("NCCL")
    return plugin is not None and plugin.creator_fn is second
