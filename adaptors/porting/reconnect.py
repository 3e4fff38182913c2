"""Phase rebuild, what of it is the same for every framework: connections, and memory that is suspect (points 8, 9).

Every process group is rebuilt, not only those of a lost rank: others may hold collectives that were cut off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.rebuild")


def reconnect(
    plan: Plan,
    *,
    device: Device,
    unconnected: Unconnected,
    attempt: int,
    phase_seconds: float,
    check: Callable[[], None],
) -> Outcome:
    """Connect all groups of this rank anew, together with the other ranks.

    Raises:
        RecoveryError: not all ranks of the job take part, or a group could not be connected.
    """
    if len(plan.participants) != dist.get_world_size():
        raise RecoveryError("rebuild", f"only ranks {plan.participants} of {dist.get_world_size()} take part")
    unconnected.leave()
    began = time.monotonic()
    number = device.rebuild_groups(attempt, plan.participants, deadline=began + phase_seconds, check=check)
    log.info("%d process groups rebuilt in %.3f s", number, time.monotonic() - began)
    return Outcome(detail=f"{number} groups")


def renew_tensors(tensors: Iterable[torch.Tensor], device: Device) -> int:
    """Allocate the memory of tensors anew; every tensor stays what it is, its content is zero.

    Returns:
        Bytes allocated.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    for storage in storages.values():
        device.renew(storage)
    return sum(storage.nbytes() for storage in storages.values())
