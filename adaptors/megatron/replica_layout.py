"""Who shares a shard with whom: the arithmetic of the replica layout, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mindio_tft_patch.protocol.messages import ReplicaSet

logger = logging.getLogger("mindio_tft_patch.replica")


def parts(ranks: Sequence[int], copies: int) -> list[list[int]]:
    """Cut a group into `copies` contiguous parts; its size must be divisible."""
    width = len(ranks) // copies
    return [list(ranks[start : start + width]) for start in range(0, len(ranks), width)]


def holders(ranks: Sequence[int], copies: int, rank: int) -> tuple[int, ...]:
    """Return the ranks of a group that hold the same shard as `rank`, ascending."""
    width = len(ranks) // copies
    return tuple(sorted(ranks[ranks.index(rank) % width :: width]))


def warn_of_shared_nodes(sets: Sequence[ReplicaSet], ranks_per_node: int) -> None:
    """Warn when one node holds all copies of a shard; ranks_per_node 0: unknown."""
    if ranks_per_node < 1:
        return
    for replicas in sets:
        nodes = {rank // ranks_per_node for rank in replicas.ranks}
        if len(replicas.ranks) > 1 and len(nodes) == 1:
            logger.warning(
                "All copies of the %s optimizer shard of ranks %s are on one node: the loss of that node costs the "
                "steps since the last periodic checkpoint. Use more nodes, or a larger data-parallel size.",
                replicas.name,
                replicas.ranks,
            )
