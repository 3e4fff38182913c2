"""Replica groups: who holds which optimizer shard (adaptation point 3).

With N copies, the data-parallel group of size d (context parallelism included) falls into N contiguous parts of d/N
ranks; the distributed optimizer is sharded over a part, and every part keeps all shards. So rank i of the group shares
its shard with the ranks i + k * d/N. Expert parameters do the same in their expert data-parallel group.

Megatron has this layout as `num_distributed_optimizer_instances`, complete from 0.17 on. core_v0.12 builds the parts of
the dense group only. What it lacks is made here while Megatron builds its own groups, because every process has to
create all groups in the same order:

    expert part       this rank's part of its expert data-parallel group (and a gloo twin for checkpoints)
    instance          all ranks that together hold one copy of everything: norms are sums over it, not over the world
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.versions import OLD
from mindio_tft_patch.adaptors.porting.replica_layout import holders, parts
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.patching import Patch
from mindio_tft_patch.protocol.messages import ReplicaSet

_EXPERT = "EXPERT_DATA_PARALLEL_GROUP"


def replica_sets() -> tuple[ReplicaSet, ...]:
    """Return the replica sets of this rank, from Megatron's groups; valid once they exist.

    "dense" always, "expert" when the model has experts. Without a distributed optimizer the whole group is one set.
    """
    from megatron.core import mpu
    from megatron.training import get_args

    arguments = get_args()
    whole = mpu.get_data_parallel_group(with_context_parallel=True)
    part = mpu.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    copies = whole.size() // part.size() if arguments.use_distributed_optimizer else whole.size()
    named = [("dense", whole)]
    if arguments.num_experts:
        named.append(("expert", mpu.get_expert_data_parallel_group()))
    found = []
    for name, group in named:
        ranks = dist.get_process_group_ranks(group)
        # Without a distributed optimizer every rank of the group has everything: as many copies as ranks.
        number = copies if arguments.use_distributed_optimizer else len(ranks)
        found.append(ReplicaSet(name, holders(ranks, number, dist.get_rank())))
    return tuple(found)


@dataclass
class ReplicaGroups:
    """What core_v0.12 lacks, of this rank.

    copies: N; 1 outside the replica layout. number: which copy this rank belongs to, from 0.
    """

    copies: int = 1
    number: int = 0
    expert_whole: dist.ProcessGroup | None = None
    expert_part: dist.ProcessGroup | None = None
    expert_part_gloo: dist.ProcessGroup | None = None
    instance: dist.ProcessGroup | None = None
    _building: bool = False
    _experts: bool = False
    _expert_ranks: list[list[int]] = field(default_factory=list)
    _timeout: Any = None

    def begin(self, copies: int, *, experts: bool) -> None:
        """Megatron starts to build its groups. experts: some parameters are reduced over expert groups."""
        self.copies, self.number, self._experts, self._building = copies, 0, experts, copies > 1
        self.expert_whole = self.expert_part = self.expert_part_gloo = self.instance = None
        self._expert_ranks = []

    def created(self, create: Callable[..., Any], group: Any, ranks: Sequence[int], options: dict[str, Any]) -> None:
        """Megatron has created a group; create the parts of it that are ours.

        Raises:
            ConfigError: the expert data-parallel group cannot be cut.
        """
        name = str(options.get("group_desc"))
        if not self._building or not name.startswith(_EXPERT):
            return
        if len(ranks) % self.copies:
            raise ConfigError(
                f"The expert data-parallel size {len(ranks)} cannot be cut into {self.copies} copies.",
                change="Change --expert-model-parallel-size or --expert-tensor-parallel-size.",
            )
        mine = dist.get_rank() in ranks
        if name == _EXPERT:
            self._expert_ranks.append(list(ranks))
            self._timeout = options.get("timeout")
            if mine:
                self.expert_whole = group
                self.number = ranks.index(dist.get_rank()) // (len(ranks) // self.copies)
        if not self._experts:
            return
        for number, part in enumerate(parts(ranks, self.copies)):
            made = create(part, **{**options, "group_desc": f"INTRA_PARTIAL_{name}"})
            if not mine or number != self.number:
                continue
            if name == _EXPERT:
                self.expert_part = made
            else:
                self.expert_part_gloo = made

    def finish(self, create: Callable[..., Any]) -> None:
        """Megatron has its groups; create one group for each copy."""
        if not self._building:
            return
        self._building = False
        for number in range(self.copies):
            ranks = sorted(rank for whole in self._expert_ranks for rank in parts(whole, self.copies)[number])
            made = create(ranks, timeout=self._timeout, group_desc="INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")
            if dist.get_rank() in ranks:
                self.instance = made
        if self._experts:
            self._check_expert_partners()

    def _check_expert_partners(self) -> None:
        """Gradients of dense and expert parameters are summed over the copies in one group; it must fit both."""
        from megatron.core import parallel_state

        dense = sorted(dist.get_process_group_ranks(parallel_state.get_inter_partial_data_parallel_group()))
        whole = next(ranks for ranks in self._expert_ranks if dist.get_rank() in ranks)
        expert = list(holders(whole, self.copies, dist.get_rank()))
        if dense != expert:
            raise ConfigError(
                f"The copies of a dense shard are on ranks {dense}, those of an expert shard on {expert}; this "
                "Megatron cannot serve both.",
                change="Use an --expert-tensor-parallel-size equal to --tensor-model-parallel-size.",
            )


def patches(groups: ReplicaGroups) -> list[Patch]:
    """Patches of point 3. groups: filled while Megatron builds its own; shared with replica.patches."""

    def initialize(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        groups.begin(
            int(kwargs.get("num_distributed_optimizer_instances", 1)),
            experts=int(kwargs.get("expert_model_parallel_size", 1)) > 1,
        )
        wrapped(*args, **kwargs)
        from megatron.core import parallel_state

        groups.finish(parallel_state.create_group)

    def create(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = wrapped(*args, **kwargs)
        if args:
            groups.created(wrapped, group, args[0], kwargs)
        return group

    return [
        Patch(
            point=3,
            target="megatron.core.parallel_state:initialize_model_parallel",
            wrapper=initialize,
            why="adds the groups of the replica layout that this release lacks: expert halves, one group a copy",
            parameters=("tensor_model_parallel_size", "pipeline_model_parallel_size"),
            versions=OLD,
        ),
        Patch(
            point=3,
            target="megatron.core.parallel_state:create_group",
            wrapper=create,
            why="creates the expert halves in the same order on every rank",
            parameters=("ranks", "timeout", "backend"),
            versions=OLD,
        ),
    ]
