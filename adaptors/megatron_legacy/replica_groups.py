"""Process groups of the replica layout: parts of the data-parallel group, holders of a shard, ranks of one copy.

Created when the optimizer is built, which every rank does at the same place of its set-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron_legacy.layout import copy_groups, data_parallel_groups
from mindio_tft_patch.adaptors.porting.replica_layout import holders, parts
from mindio_tft_patch.protocol.messages import ReplicaSet


@dataclass(frozen=True)
class ReplicaGroups:
    """Groups of this rank.

    copies: N. number: which copy this rank belongs to, from 0.
    part: ranks over which the optimizer of this copy is sharded. index, size: place in it.
    partners: ranks that hold the same shard.
    copy: ranks that together hold one copy of everything.
    """

    copies: int
    number: int
    index: int
    size: int
    part: Any
    partners: Any
    copy: Any


def create(copies: int) -> ReplicaGroups:
    """Create the groups; every rank of the job must call this at the same time."""
    from megatron.core import mpu

    rank = dist.get_rank()
    everyone = data_parallel_groups(
        dist.get_world_size(), mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size()
    )
    own: dict[str, Any] = {}

    def group(name: str, ranks: list[int]) -> None:
        made = dist.new_group(ranks)
        if rank in ranks:
            own[name] = made

    for ranks in everyone:
        for part in parts(ranks, copies):
            group("part", part)
        for place in range(len(ranks) // copies):
            group("partners", list(holders(ranks, copies, ranks[place])))
    for number, ranks in enumerate(copy_groups(everyone, copies)):
        group("copy", ranks)
        if rank in ranks:
            own["number"] = number
    return ReplicaGroups(copies=copies, index=dist.get_rank(own["part"]), size=dist.get_world_size(own["part"]), **own)


def replica_sets(copies: int, *, sharded: bool) -> tuple[ReplicaSet, ...]:
    """Return the one replica set of this rank.

    sharded: the optimizer is the distributed one; else every data-parallel rank holds everything.
    """
    from megatron.core import mpu

    ranks = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    return (ReplicaSet("dense", holders(ranks, copies if sharded else len(ranks), dist.get_rank())),)
