"""`torch.npu`: what torch.cuda has, from torch.cuda, and what only an NPU has."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu.runtime import runtime


def __getattr__(name: str) -> Any:
    # When it is asked for, not when this is imported: the CPU stand-in for torch.cuda may come later.
    return getattr(torch.cuda, name)


def set_option(options: dict[str, Any]) -> None:
    """There is no compiler to be given options."""


def set_compile_mode(**options: bool) -> None:
    """There is no compiler."""


def stop_device(device: int) -> int:
    """End what the device does; 0: done."""
    return runtime.stop()


def restart_device(device: int, rebuild_all_resources: bool = False) -> None:
    """Make it usable again."""
    runtime.restart()


def check_uce_in_memory(device: int) -> int:
    """What a memory error has hit."""
    return runtime.memory_error
