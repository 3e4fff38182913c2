"""The distributed optimizer of 2023 with N copies of its state in the data-parallel group.

It is sharded over a contiguous part of the data-parallel group in place of all of it; the parts are copies of each
other. Importing this module imports Megatron's optimizer.

    reduce-scatter   over the part; then the holders of a shard add up what their parts have
    all-gather       over the part
    gradient norm    over the ranks of one copy: over the world every shard would count N times
    cuts of buffers  from the padded size, see layout.pieces
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.optimizer import distrib_optimizer
from megatron.optimizer.distrib_optimizer import DistributedOptimizer, Range

from mindio_tft_patch.adaptors.megatron_legacy import replica_groups
from mindio_tft_patch.adaptors.megatron_legacy.layout import Piece, pieces
from mindio_tft_patch.adaptors.megatron_legacy.replica_groups import ReplicaGroups

DEFAULT_COPIES = 2


class _PartOfMpu:
    """Megatron's mpu, for which the data-parallel group is this rank's part of it.

    The size stays that of the whole group, because gradients are averaged over all of it.
    """

    def __init__(self, mpu: Any, groups: ReplicaGroups) -> None:
        self._mpu = mpu
        self._groups = groups

    def get_data_parallel_rank(self) -> int:
        """Place in the part."""
        return self._groups.index

    def get_data_parallel_group(self) -> Any:
        """The part."""
        return self._groups.part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mpu, name)


class ReplicatedOptimizer(DistributedOptimizer):  # type: ignore[misc]
    """Megatron's DistributedOptimizer, sharded over a part of the data-parallel group.

    Attributes:
        copies: N; set it on the class before the optimizer is built.
        groups: process groups; created with the first optimizer of a process.
    """

    copies = DEFAULT_COPIES
    groups: ReplicaGroups

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not hasattr(ReplicatedOptimizer, "groups"):
            ReplicatedOptimizer.groups = replica_groups.create(self.copies)
        super().__init__(*args, **kwargs)

    @classmethod
    def build_model_gbuf_range(cls, model: Any, dtype: Any) -> dict[str, Any]:
        """Which elements of a gradient buffer this rank, and every other of its part, updates."""
        buffer, groups = model._grad_buffers[dtype], cls.groups
        cut = pieces(buffer.numel, buffer.numel_padded, groups.size)
        everyone = [_range(piece) for piece in cut]
        world = everyone[groups.index]
        return {
            "local": world.normalize(),
            "world": world,
            "world_all": everyone,
            "param_map": cls.build_model_gbuf_param_range_map(model, dtype, world),
            "max_range_size": buffer.numel_padded // groups.size,
        }

    @staticmethod
    def get_model_buffer_dp_views(model_buffers: list[dict[Any, Any]]) -> list[tuple[Any, ...]]:
        """Each buffer with its pieces: (model index, type, buffer, [piece of each rank of the part])."""
        size = ReplicatedOptimizer.groups.size
        return [
            (index, dtype, buffer, list(buffer.chunk(size)))
            for index, buffers in enumerate(model_buffers)
            for dtype, buffer in buffers.items()
        ]

    def get_model_parallel_group(self) -> Any:
        """Ranks over which norms, zeros and overflows are counted: those of one copy."""
        return self.groups.copy

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        """Average the gradients over the whole data-parallel group; each rank gets its shard."""
        with self._over_part():
            super().reduce_model_grads(args, timers)
        if self.groups.copies == 1:
            return
        for _, _, _, views in self.get_model_grad_buffer_dp_views():
            dist.all_reduce(views[self.groups.index], group=self.groups.partners)

    def gather_model_params(self, args: Any, timers: Any) -> None:
        """Gather the model's parameters from the ranks of the part."""
        with self._over_part():
            super().gather_model_params(args, timers)

    @contextmanager
    def _over_part(self) -> Iterator[None]:
        before = distrib_optimizer.mpu
        distrib_optimizer.mpu = _PartOfMpu(before, self.groups)
        try:
            yield
        finally:
            distrib_optimizer.mpu = before


def _range(piece: Piece) -> Any:
    return Range(piece.start, piece.stop)
