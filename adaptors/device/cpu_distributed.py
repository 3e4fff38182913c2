"""What differs between gloo and a GPU's collectives in the eyes of Megatron.

Little: from torch 2.14 on gloo has every collective that Megatron calls (averages, reduce-scatter, all-to-all,
coalescing), for every type, in a fixed order of summation.
"""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Any

import torch
import torch.distributed

from mindio_tft_patch.adaptors.device.cpu_registry import Registry


def install(registry: Registry) -> None:
    """Replace `init_process_group` and `isend` under both of their names."""
    initialise = torch.distributed.init_process_group
    send = torch.distributed.isend

    @functools.wraps(initialise)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # A group bound to a CUDA device would make the barrier look for that device.
        kwargs.pop("device_id", None)
        result = initialise(*args, **kwargs)
        atexit.unregister(_leave)
        atexit.register(_leave)
        return result

    @functools.wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron frees an output (`output.data = ...`) that is still being sent; on a GPU the allocator keeps the
        # memory until the stream is done. The alias keeps it here: gloo holds the alias, the alias the memory.
        return send(tensor.detach(), *args, **kwargs)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        registry.set(module, "init_process_group", init_process_group)
        registry.set(module, "isend", isend)


def _leave() -> None:
    """Destroy the groups at a regular exit, which core_v0.12 leaves to the interpreter: gloo's threads may abort it.

    After an exception nothing is done: peers may be gone, and gloo would wait for them.
    """
    if torch.distributed.is_initialized() and getattr(sys, "last_type", None) is None:
        torch.distributed.destroy_process_group()
