"""Digests of what a rank holds of each kind of shard; the holders of a shard must agree on them, bit by bit."""

from __future__ import annotations

from typing import Any

import torch

from mindio_tft_patch.adaptors.megatron.shard_state import tensors_of
from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.adaptors.porting.digest import digest_of


def shard_digests(optimizer: Any, model: list[Any], names: dict[int, str]) -> dict[str, str]:
    """Digest of the state of each kind of shard, and of the model's parameters, by replica set.

    Args:
        names: replica set ("dense", "expert") of each optimizer of the chain, by its number.
    """
    by_set: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for number, leaf in enumerate(leaf_optimizers(optimizer)):
        if number in names and leaf.optimizer is not None:
            by_set.setdefault(names[number], []).extend(
                (f"{number}/{name}", tensor) for name, tensor in tensors_of(leaf)
            )
    for place, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            kind = "dense" if getattr(parameter, "allreduce", True) else "expert"
            by_set.setdefault(kind, []).append((f"model{place}/{name}", parameter))
    return {kind: digest_of(tensors) for kind, tensors in by_set.items()}
