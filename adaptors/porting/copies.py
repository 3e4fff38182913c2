"""Phase repair, what of it is the same for every framework: who sends what to whom, and the proof that copies are equal
(adaptation point 10)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.repair")


def source_of(plan: Plan, faulty: int, name: str) -> int | None:
    """The rank that speaks for the shard of this name that a faulty rank holds; None: it holds none that is known."""
    found = [one for one in plan.sources if one.replica_set.name == name and faulty in one.replica_set.ranks]
    return found[0].source if found else None


def transfers(plan: Plan, name: str) -> Iterator[tuple[int, int]]:
    """Source and target of every transfer of shards of this name, in an order that is the same on all ranks.

    Raises:
        RecoveryError: the plan has no source for the shard of a faulty rank.
    """
    for faulty in plan.faulty:
        source = source_of(plan, faulty, name)
        if source is None:
            raise RecoveryError("repair", f"the plan has no source for the {name} shard of rank {faulty}")
        yield source, faulty


def check_copies(plan: Plan, digests: Mapping[str, str]) -> None:
    """All ranks together: holders of a shard must be equal in every bit, also where nothing was moved.

    Args:
        digests: of what this rank holds (digest.digest_of), by name of the replica set.

    Raises:
        RecoveryError: they differ.
    """
    everyone: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(digests))
    for one in plan.sources:
        found = {rank: everyone[rank].get(one.replica_set.name) for rank in one.replica_set.ranks}
        if len(set(found.values())) > 1:
            raise RecoveryError("repair", f"the holders of the {one.replica_set.name} shard differ: {found}")
    log.info("all copies of every shard are equal, bit by bit", extra={"fields": {"verified": True}})
