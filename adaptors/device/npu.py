"""Ascend NPUs over HCCL, by torch_npu's public API.

stop_device and restart_device of torch_npu.npu, check_uce_in_memory (npu_memory.py), reinit_process_group
(npu_groups.py). Written to torch_npu's source and tested with a stand-in; never run on hardware by us; see
docs/verified.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from mindio_tft_patch.adaptors.device import npu_groups, npu_memory, regroup
from mindio_tft_patch.adaptors.device.host_wait import HostWait
from mindio_tft_patch.adaptors.device.interface import host_group, renew_in_place
from mindio_tft_patch.adaptors.device.npu_memory import MemoryKind
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard

log = logging.getLogger("mindio_tft_patch.device")

_NEEDED = ("stop_device", "restart_device", "check_uce_in_memory")
_NEEDED_GROUPS = "reinit_process_group"


def _torch_npu() -> Any:
    # Imported late: only machines with an NPU have it.
    import torch_npu

    return torch_npu


class NpuDevice:
    """A rank that computes on an Ascend NPU.

    Args:
        index: device index on this node, until the framework has chosen its device: the local rank.
    """

    name = "npu"

    def __init__(self, index: int, board: ProgressBoard) -> None:
        self._board = board
        self._index = index
        self.flag = StopFlag()
        self._waits = InterruptibleWaits(self.flag, board, everywhere=False)

    def install(self) -> None:
        """The runtime can be stopped from any thread; only the wait of the main thread must be guessed."""
        self._board.probe_with(HostWait(threading.get_ident()))
        self._waits.install()

    def stop(self) -> None:
        """The runtime ends running tasks and raises an error containing FORCE STOP in the main thread."""
        self.flag.stop()
        result = _torch_npu().npu.stop_device(self._index)
        if result:
            # None from older versions. Nothing more can be done here; if the main thread does not come, the phase ends
            # by its time limit.
            log.error("stop_device(%d) returned %s: the main thread may stay where it is", self._index, result)

    def clean(self) -> None:
        """Make the stopped device usable again, and find out what a memory error has hit.

        Raises:
            RecoveryError: memory was hit that no refilling makes good.
        """
        npu = _torch_npu().npu
        # Before the restart, which repairs what this call has found, and forgets it. Versions without it cannot recover
        # in place, but can save.
        kind = MemoryKind.NONE
        if hasattr(npu, "check_uce_in_memory"):
            kind = npu_memory.kind_of(npu.check_uce_in_memory(self._index))
        npu.restart_device(self._index)
        if kind is not MemoryKind.NONE:
            log.warning("memory error: %s", kind.value)
        if kind is MemoryKind.FOREIGN:
            raise RecoveryError("clean", f"memory error: {kind.value}")

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.npu.synchronize()

    def gate_group(self) -> Any:
        """HCCL barriers do not wait on the host; gloo's do."""
        # Asked for when training is about to begin: by now the framework has chosen the device, which is not the local
        # rank where each process sees one device only. Not in stop(): the current device is one of the thread.
        self._index = torch.npu.current_device()
        return host_group()

    def host_waits(self) -> AbstractContextManager[None]:
        """Stopping the device does not end a wait on the host."""
        return self._waits.on_host()

    def in_place_refusal(self) -> str:
        """Names what the installed torch and torch_npu lack."""
        module = _torch_npu()
        missing = [f"torch_npu.npu.{name}" for name in _NEEDED if not hasattr(module.npu, name)]
        if not hasattr(getattr(module, "distributed", None), _NEEDED_GROUPS):
            missing.append(f"torch_npu.distributed.{_NEEDED_GROUPS}")
        if missing:
            version = getattr(module, "__version__", "of unknown version")
            return f"torch_npu {version} has no {' and no '.join(missing)}"
        return regroup.missing_support()  # for the gloo groups

    def rebuild_groups(
        self, attempt: int, members: Sequence[int], *, deadline: float, check: Callable[[], None]
    ) -> int:
        """HCCL first, on this rank alone; then gloo, together with all."""
        reinit = _torch_npu().distributed.reinit_process_group
        number = npu_groups.reinit_hccl(reinit, check=check)
        return number + regroup.rebuild_groups(
            attempt, members, deadline=deadline, check=check, parts=npu_groups.gloo_parts
        )

    def renew(self, storage: torch.UntypedStorage) -> None:
        """The allocator may hand the same block out again: restart_device has repaired it, allocating clears its mark.

        Raises:
            RuntimeError: the memory has one of the NPU's private formats, which cannot be resized.
        """
        renew_in_place(storage)

    def describe_memory_fault(self, error: BaseException) -> str:
        """By the text of the exception alone: the device must not be asked before it is stopped."""
        return npu_memory.describe(str(error))
