"""Phase rebuild: make communication between the ranks work again, in place, and suspect memory usable (points 8, 9).

Every process group is rebuilt, not only those of a lost rank: others may hold collectives that were cut off. On a rank
with a memory error all of the model's and the optimizer's memory is given back and allocated anew; the objects stay,
what they hold comes from a replica in the next phase.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mindio_tft_patch.adaptors.device.interface import Device
from mindio_tft_patch.adaptors.device.unconnected import Unconnected
from mindio_tft_patch.adaptors.megatron.shard_state import tensors_of
from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.adaptors.porting.reconnect import reconnect, renew_tensors
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.rebuild")


def rebuild(
    plan: Plan,
    *,
    suspect: bool,
    model: list[Any],
    optimizer: Any,
    device: Device,
    unconnected: Unconnected,
    attempt: int,
    phase_seconds: float,
    check: Callable[[], None],
) -> Outcome:
    """Connect all groups of this rank anew, together with the other ranks.

    Args:
        suspect: the memory of this rank has to be made anew.

    Raises:
        RecoveryError: not all ranks of the job take part, or a group could not be connected.
    """
    if suspect:
        size = renew_tensors(_tensors(model, optimizer), device)
        log.warning("%d bytes of model and optimizer were allocated anew", size)
    return reconnect(
        plan, device=device, unconnected=unconnected, attempt=attempt, phase_seconds=phase_seconds, check=check
    )


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
