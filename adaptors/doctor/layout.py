"""Which ranks will hold the same optimizer shard, worked out before there are any groups.

Megatron's rank order is `tp-cp-ep-dp-pp`, the first varying fastest, or `tp-cp-ep-pp-dp` with
--use-tp-pp-dp-mapping. Ranks of one data-parallel group (context parallelism included) differ in cp and dp only; those
of one expert data-parallel group in the expert dp only, with the expert tensor-parallel size in place of tp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.porting.replica_layout import parts
from mindio_tft_patch.protocol.messages import ReplicaSet


@dataclass(frozen=True)
class Layout:
    """Where optimizer shards live.

    Attributes:
        world_size: ranks of the job. ranks_per_node: of them on each node.
        sets: ranks that hold the same shard, each set once.
    """

    world_size: int
    ranks_per_node: int
    sets: tuple[ReplicaSet, ...]

    def alone_on(self, node: int) -> list[ReplicaSet]:
        """Shards of which one node holds every copy."""
        return [one for one in self.sets if all(self.node_of(rank) == node for rank in one.ranks)]

    def node_of(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.node_of(self.world_size - 1) + 1

    @property
    def fewest_holders(self) -> ReplicaSet:
        """A shard with the fewest copies."""
        return min(self.sets, key=lambda one: len(one.ranks))


def layout_of(arguments: Mapping[str, Any], world_size: int, ranks_per_node: int, copies: int) -> Layout | None:
    """The layout that Megatron will make; None when the sizes do not fit together.

    arguments: Megatron's, by attribute name. copies: of each shard, where the optimizer is sharded.
    """
    pipeline = _size(arguments, "pipeline_model_parallel_size")
    tensor = _size(arguments, "tensor_model_parallel_size")
    pipeline_first = bool(arguments.get("use_tp_pp_dp_mapping"))
    sharded = bool(arguments.get("use_distributed_optimizer"))
    kinds = [("dense", tensor)]
    if arguments.get("num_experts"):
        expert_tensor = int(arguments.get("expert_tensor_parallel_size") or tensor)
        kinds.append(("expert", expert_tensor * _size(arguments, "expert_model_parallel_size")))
    sets: list[ReplicaSet] = []
    for name, inner in kinds:
        if world_size < 1 or world_size % (inner * pipeline):
            return None
        for group in _groups(world_size, inner, pipeline, pipeline_first=pipeline_first):
            number = copies if sharded else len(group)
            if len(group) % number:
                return None
            sets += [ReplicaSet(name, tuple(sorted(ranks))) for ranks in zip(*parts(group, number), strict=True)]
    return Layout(world_size, ranks_per_node, tuple(sets))


def _groups(world_size: int, inner: int, pipeline: int, *, pipeline_first: bool) -> Iterator[list[int]]:
    size = world_size // (inner * pipeline)
    for stage in range(pipeline):
        for place in range(inner):
            if pipeline_first:
                yield [place + inner * (stage + pipeline * member) for member in range(size)]
            else:
                yield [place + inner * (member + size * stage) for member in range(size)]


def _size(arguments: Mapping[str, Any], name: str) -> int:
    return max(1, int(arguments.get(name) or 1))
