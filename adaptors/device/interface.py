"""What the phases need of a device, and the choice among cpu, cuda and npu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.cpu import accelerator_present
from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.progress import ProgressBoard


class Device(Protocol):
    """Stop, clean and synchronise one rank's device. Nothing here needs another rank."""

    name: str
    flag: StopFlag  # raised by stop()

    def install(self) -> None:
        """Prepare the main thread for being stopped; called once, on the main thread, before training."""
        ...

    def stop(self) -> None:
        """Control thread: make the main thread leave blocked collectives and kernels by an exception."""
        ...

    def clean(self) -> None:
        """Main thread: after stop(), make the device usable for local work (saving, finishing an update)."""
        ...

    def synchronize(self) -> None:
        """Wait for the work that was queued on the device."""
        ...

    def gate_group(self) -> Any:
        """Process group for the commit gate: a barrier on it must mean that every rank's *host* arrived."""
        ...

    def host_waits(self) -> AbstractContextManager[None]:
        """Around what the main thread does with the gate group or a partner group: it can be stopped in there too.

        Where stopping means stopping the device, nothing else would end a wait for a rank that lives but does not come.
        """
        ...

    def in_place_refusal(self) -> str:
        """Why communication cannot be rebuilt in place here; empty when it can. Asked before training."""
        ...

    def rebuild_groups(
        self, attempt: int, members: Sequence[int], *, deadline: float, check: Callable[[], None]
    ) -> int:
        """Make the connections of all process groups anew, together with all other ranks.

        Args:
            attempt: number of the recovery; never used twice.
            members: all ranks of the job.
            deadline: monotonic seconds.
            check: called while waiting; raises to give up.

        Returns:
            Number of groups.

        Raises:
            RecoveryError: a group could not be connected.
        """
        ...

    def renew(self, storage: torch.UntypedStorage) -> None:
        """Give suspect memory back and allocate it anew, filled with zeros; tensors over it stay valid."""
        ...

    def describe_memory_fault(self, error: BaseException) -> str:
        """One line on what an exception says about on-chip memory, for a fault's detail; empty for other errors."""
        ...


def host_group() -> Any:
    """A gloo group over all ranks, for devices whose own collectives do not wait on the host."""
    return dist.new_group(backend="gloo", group_desc="TFT_GATE")


def partner_group(ranks: Sequence[int]) -> Any:
    """A gloo group of some ranks, for small things that are exchanged on the host; only its members call this."""
    return dist.new_group(
        list(ranks),
        backend="gloo",
        use_local_synchronization=True,
        group_desc="TFT_PARTNERS",
        timeout=timedelta(minutes=30),
    )


def renew_in_place(storage: torch.UntypedStorage) -> None:
    """Device.renew for allocators that give memory back on resize."""
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    storage.fill_(0)


def select_device(config: Config, board: ProgressBoard) -> Device:
    """The device of this rank, by TFT_DEVICE or by what is present.

    Raises:
        ConfigError: TFT_DEVICE names a device that is not there.
    """
    # The NPU runtime registers itself with torch; without it torch has no attribute `npu`.
    npu = getattr(torch, "npu", None)
    accelerator = accelerator_present()  # false under the CPU stand-in, whatever torch.cuda then says
    present = {
        "npu": accelerator and npu is not None and npu.is_available(),
        "cuda": accelerator and torch.cuda.is_available(),
        "cpu": True,
    }
    name = config.device if config.device != "auto" else next(key for key in ("npu", "cuda", "cpu") if present[key])
    if not present[name]:
        raise ConfigError(f"TFT_DEVICE={name}, but torch finds no such device.", change="Unset TFT_DEVICE.")
    if name == "npu":
        from mindio_tft_patch.adaptors.device.npu import NpuDevice

        return NpuDevice(config.local_rank, board)
    if name == "cuda":
        from mindio_tft_patch.adaptors.device.cuda import CudaDevice

        return CudaDevice(board)
    from mindio_tft_patch.adaptors.device.gloo import GlooDevice

    return GlooDevice(board)
