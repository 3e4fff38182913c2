"""Compares the copies of every shard from time to time, to find silent corruption (TFT_SCRUB_INTERVAL).

Every so many steps each rank computes a digest of its parameters and optimizer state, just before the gate of the
next step, when nothing of it is under way; the digests travel with the facts that partners exchange there anyway.
Copies that differ cannot both be right, and nobody can tell which one is. What follows is the user's choice
(TFT_SCRUB_ACTION): a warning; the end of the job; or a checkpoint of the last step on which the copies agreed, of which
each rank keeps its part in host memory, twice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mindio_tft_patch.adaptors.megatron.digest import shard_digests
from mindio_tft_patch.adaptors.megatron.repair import kind_of
from mindio_tft_patch.adaptors.megatron.shard_state import tensors_of
from mindio_tft_patch.adaptors.megatron.train_state import StepRecord, leaf_optimizers
from mindio_tft_patch.adaptors.megatron.training_objects import Training
from mindio_tft_patch.protocol.messages import ReplicaSet

log = logging.getLogger("mindio_tft_patch.scrub")

# Others may find a difference where this rank and its partners have found none; then all go back by one more.
_GENERATIONS = 2


@dataclass(frozen=True)
class Difference:
    """Copies of a shard that are not the same.

    agreed: the last step on which they were found equal; 0: none.
    """

    step: int
    shard: str
    ranks: tuple[int, ...]
    digests: dict[int, str]
    agreed: int

    def __str__(self) -> str:
        found = ", ".join(f"rank {rank}: {digest}" for rank, digest in sorted(self.digests.items()))
        return f"the copies of the {self.shard} shard of ranks {self.ranks} differ at step {self.step} ({found})"


def differences(
    digests: Mapping[int, Mapping[str, str]], replica_sets: Sequence[ReplicaSet], *, step: int, agreed: int
) -> list[Difference]:
    """Compare the digests of the holders of each shard.

    Args:
        digests: by rank, by replica set.
        replica_sets: those of this rank.
    """
    found = []
    for one in replica_sets:
        held = {rank: digests[rank][one.name] for rank in one.ranks if one.name in digests.get(rank, {})}
        if len(set(held.values())) > 1:
            found.append(Difference(step, one.name, one.ranks, held, agreed))
    return found


@dataclass(frozen=True)
class _Kept:
    """This rank's part of a step, in host memory."""

    record: StepRecord
    state: list[torch.Tensor]


class Scrub:
    """The comparisons of one rank.

    Args:
        interval: steps between two comparisons; 0: none.
        keeps: keep this rank's part of the last agreed steps in host memory.

    Attributes:
        agreed: last step on which all copies that this rank knows of were equal; 0: none.
    """

    def __init__(self, interval: int, *, keeps: bool) -> None:
        self._interval = interval
        self._keeps = keeps
        self.agreed = 0
        self._kept: list[_Kept] = []

    def digests(self, training: Training, step: int) -> dict[str, str]:
        """Digests of the state at `step`, by replica set; empty when no comparison is due."""
        if not self._interval or step == 0 or step % self._interval:
            return {}
        names = {number: kind_of(leaf) for number, leaf in enumerate(leaf_optimizers(training.optimizer))}
        return shard_digests(training.optimizer, training.model, names)

    def compare(
        self,
        digests: Mapping[int, Mapping[str, str]],
        replica_sets: Sequence[ReplicaSet],
        training: Training,
        step: int,
    ) -> list[Difference]:
        """What the digests of all partners say about `step`; keeps the state when they agree."""
        found = differences(digests, replica_sets, step=step, agreed=self.agreed)
        if found:
            return found
        log.info("the copies of this rank's state are equal at step %d", step, extra={"fields": {"verified": True}})
        self.agreed = step
        if self._keeps:
            self._keep(training)
        return []

    def go_back(self, training: Training, step: int) -> bool:
        """Put this rank's optimizer state and record back to `step`; False when they were not kept."""
        kept = next((one for one in self._kept if one.record.step == step), None)
        if kept is None:
            return False
        for (_, tensor), copy in zip(_tensors(training.optimizer), kept.state, strict=True):
            tensor.data.copy_(copy)
        training.state.record = kept.record
        return True

    def _keep(self, training: Training) -> None:
        state = [tensor.detach() for _, tensor in _tensors(training.optimizer)]
        oldest = self._kept.pop(0) if len(self._kept) == _GENERATIONS else None
        if oldest is None or len(oldest.state) != len(state):
            copies = [torch.empty_like(tensor, device="cpu") for tensor in state]
        else:
            copies = oldest.state
        for copy, tensor in zip(copies, state, strict=True):
            copy.copy_(tensor)
        self._kept.append(_Kept(training.state.record, copies))


def _tensors(optimizer: Any) -> list[tuple[str, torch.Tensor]]:
    return [found for leaf in leaf_optimizers(optimizer) for found in tensors_of(leaf)]
