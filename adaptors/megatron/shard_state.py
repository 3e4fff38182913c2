"""The state of one of Megatron's optimizers on one rank: that of the torch optimizer inside it, if it has a share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mindio_tft_patch.adaptors.porting import optimizer_state


def parameters_of(leaf: Any) -> list[torch.Tensor]:
    """What the torch optimizer updates on this rank, in a fixed order; empty when it has no share."""
    return optimizer_state.parameters_of(leaf.optimizer)


def tensors_of(leaf: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the state, with a name that is the same on all holders."""
    return optimizer_state.tensors_of(leaf.optimizer)


def send_state(leaf: Any, target: int) -> int:
    """Send the state of an optimizer to a rank that holds the same shard. Returns the bytes sent."""
    return optimizer_state.send_optimizer(leaf.optimizer, target)


def receive_state(leaf: Any, source: int) -> int:
    """Take over the state of an optimizer, whatever this rank had. Returns the bytes received.

    Raises:
        ValueError: the two ranks do not hold the same shard.
    """
    return optimizer_state.receive_optimizer(leaf.optimizer, source)
