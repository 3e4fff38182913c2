"""What the phases need of a device, and the choice among cpu, cuda and npu."""

from __future__ import annotations

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


def host_group() -> Any:
    """A gloo group over all ranks, for devices whose own collectives do not wait on the host."""
    return dist.new_group(backend="gloo", group_desc="TFT_GATE")


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
