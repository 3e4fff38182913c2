"""Phase rebuild: make communication between the ranks work again, in place, and suspect memory usable (points 8, 9).

Every process group is rebuilt, not only those of a lost rank: others may hold collectives that were cut off. On a rank
with a memory error all of the model's and the optimizer's memory is given back and allocated anew; the objects stay,
what they hold comes from a replica in the next phase.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.megatron.shard_state import tensors_of
from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.rebuild")


def rebuild(
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


def renew_memory(model: list[Any], optimizer: Any, device: Device) -> int:
    """Allocate all memory of model and optimizer anew; every tensor stays what it is, its content is zero.

    Returns:
        Bytes allocated.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(model, optimizer):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    for storage in storages.values():
        device.renew(storage)
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(model: list[Any], optimizer: Any) -> Iterator[torch.Tensor]:
    for chunk in model:
        for parameter in chunk.parameters():
            yield parameter.data
            for name in ("main_grad", "grad"):
                gradient = getattr(parameter, name, None)
                if isinstance(gradient, torch.Tensor):
                    yield gradient
        for buffer in _ddp_buffers(chunk):
            for name in ("param_data", "grad_data"):
                data = getattr(buffer, name, None)
                if isinstance(data, torch.Tensor):
                    yield data
    for leaf in leaf_optimizers(optimizer):
        for _, tensor in tensors_of(leaf):
            yield tensor.data


def _ddp_buffers(chunk: Any) -> list[Any]:
    dense, expert = getattr(chunk, "buffers", ()), getattr(chunk, "expert_parallel_buffers", ())
    # A plain module has a method of this name.
    return [*(() if callable(dense) else dense), *expert]
