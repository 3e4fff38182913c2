"""Who shares a shard with whom: the arithmetic of the replica layout, without torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.messages import ReplicaSet

logger = logging.getLogger("mindio_tft_patch.replica")


def parts(ranks: Sequence[int], copies: int) -> list[list[int]]:
    """Cut a group into `copies` contiguous parts.

    Raises:
        ConfigError: its size is not divisible.
    """
    if len(ranks) % copies:
        raise ConfigError(
            f"A data-parallel group of {len(ranks)} ranks cannot be cut into {copies} copies of the optimizer state.",
            change="Use a size that can be divided, another TFT_REPLICAS, or --distributed-optimizer-no-replica.",
        )
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
