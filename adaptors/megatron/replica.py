"""The replica optimizer: N copies of the optimizer state in the data-parallel group (adaptation point 4).

Megatron's own layout of several distributed-optimizer instances is switched on by one argument; `validate` sets it.
From 0.17 on that is all, except for checkpoints in the `torch` format. core_v0.12 needs these corrections:

    gradient norm, zeros, overflow   are reduced over one copy; it reduces over the world and counts a shard N times
    expert buffers                   are sharded over the expert part; it shards them over the whole expert group
    expert optimizer                 gets the part and the number of its copy; it gets the whole group and number 0
    assertion                        it refuses expert parallelism with several instances, for lack of the above
    broadcast_params                 reaches the other copies; it stays inside a part
    sharded state                    the other copies' common state is a replica; it claims to be the main copy
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron import replica_bytes
from mindio_tft_patch.adaptors.megatron.groups import ReplicaGroups, replica_sets
from mindio_tft_patch.adaptors.megatron.groups import patches as group_patches
from mindio_tft_patch.adaptors.megatron.versions import OLD
from mindio_tft_patch.adaptors.porting.replica_layout import warn_of_shared_nodes
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.patching import Patch

logger = logging.getLogger("mindio_tft_patch.replica")

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_DDP = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel"


def patches(config: Config, groups: ReplicaGroups | None = None) -> list[Patch]:
    """Patches of points 3 and 4 for every version; those of core_v0.12 do nothing while `groups.copies` is 1.

    groups: where the groups of core_v0.12 are kept; default: only in these patches.
    """
    groups = groups or ReplicaGroups()
    return [
        *group_patches(groups),
        *_everywhere(config),
        *_norms(groups),
        *_expert_buffers(groups),
        *_state(groups),
    ]


def _everywhere(config: Config) -> list[Patch]:
    def build(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_prepared()
        optimizer = wrapped(*args, **kwargs)
        if dist.get_rank() == 0:
            log_cost(optimizer)
            warn_of_shared_nodes(replica_sets(), config.local_world_size)
        return optimizer

    def save(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Every copy would write the same file at the same time; the gathering inside stays within a copy.
        if copy_number(instance) == 0:
            wrapped(*args, **kwargs)

    why = "only the first copy writes the optimizer file of a `torch` checkpoint"
    return [
        Patch(4, "megatron.core.optimizer:get_megatron_optimizer", build, "tells what the replica costs", ("config",)),
        Patch(4, f"{_DISTRIBUTED}.save_parameter_state", save, why, ("filename",), mandatory=False),
        Patch(
            4,
            "megatron.core.optimizer.optimizer:ChainedOptimizer.save_parameter_state",
            save,
            why,
            ("filename",),
            mandatory=False,
        ),
    ]


def copy_number(optimizer: Any) -> int:
    """Return which copy of the optimizer state an optimizer, chained or not, belongs to; 0 without copies."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return max((int(getattr(one, "distributed_optimizer_instance_id", 0)) for one in chained), default=0)


def _norms(groups: ReplicaGroups) -> list[Patch]:
    def stats_group(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*args, **kwargs) if groups.instance is None else groups.instance

    return [
        Patch(
            4,
            f"{_DISTRIBUTED}.get_grad_stats_parallel_group",
            stats_group,
            "gradient norm and zero count are summed over one copy, not over all",
            (),
            versions=OLD,
            mandatory=False,  # never asked for without a distributed optimizer
        )
    ]


def _expert_buffers(groups: ReplicaGroups) -> list[Patch]:
    building = _Switch()

    def construct(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with building.on(groups.expert_part is not None):
            return wrapped(*args, **kwargs)

    def expert_size(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return 1 if building.active else wrapped(*args, **kwargs)

    def buffer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return wrapped(*(_part_for(groups, value) for value in args), **kwargs)

    def optimizer(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if groups.expert_part is not None and kwargs.get("data_parallel_group") is groups.expert_whole:
            kwargs["data_parallel_group"] = groups.expert_part
            if kwargs.get("data_parallel_group_gloo") is not None:
                kwargs["data_parallel_group_gloo"] = groups.expert_part_gloo
            kwargs["distributed_optimizer_instance_id"] = groups.number
        return wrapped(*args, **kwargs)

    def broadcast(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wrapped(*args, **kwargs)
        if groups.copies > 1:
            _broadcast_to_copies(instance)

    def patch(target: str, wrapper: Any, why: str, parameters: tuple[str, ...], mandatory: bool = True) -> Patch:
        return Patch(4, target, wrapper, why, parameters, versions=OLD, mandatory=mandatory)

    return [
        patch(f"{_DDP}.__init__", construct, "admits expert parallelism with several copies", ("config", "ddp_config")),
        patch(
            "megatron.core.parallel_state:get_expert_model_parallel_world_size",
            expert_size,
            "admits expert parallelism with several copies (answers the assertion in DistributedDataParallel)",
            (),
            mandatory=False,
        ),
        patch(
            "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer.__init__",
            buffer,
            "shards the buffers of experts over the expert half",
            ("ddp_config", "param_dtype", "grad_dtype", "params", "data_parallel_group"),
        ),
        patch(
            "megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
            optimizer,
            "gives the expert optimizer its half and the number of its copy",
            ("config", "model_chunks", "param_groups", "per_model_buffers", "model_parallel_group"),
        ),
        patch(f"{_DDP}.broadcast_params", broadcast, "reaches the other copies", (), mandatory=False),
    ]


def _state(groups: ReplicaGroups) -> list[Patch]:
    def state(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = wrapped(*args, **kwargs)
        number = copy_number(instance)
        if number:
            for value in result.values():
                _mark_replica(value, number * instance.data_parallel_group.size())
        return result

    def param_state(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        loading = kwargs.get("is_loading", args[1] if len(args) > 1 else False)
        number = copy_number(instance)
        if not loading or not number:
            return wrapped(*args, **kwargs)
        # Only copy 0 would read the state, and the other copies would have nothing to scatter.
        instance.distributed_optimizer_instance_id = 0
        try:
            return wrapped(*args, **kwargs)
        finally:
            instance.distributed_optimizer_instance_id = number

    return [
        Patch(
            4,
            f"{_DISTRIBUTED}.sharded_state_dict",
            state,
            "marks the common state of the other copies as replicas",
            ("model_sharded_state_dict", "is_loading"),
            versions=OLD,
            mandatory=False,
        ),
        Patch(
            4,
            f"{_DISTRIBUTED}.sharded_param_state_dp_zero",
            param_state,
            "lets every copy load the state that copy 0 saved",
            ("model_sharded_state_dict", "is_loading"),
            versions=OLD,
            mandatory=False,
        ),
    ]


class _Switch:
    """Marks a stretch of code on the main thread."""

    def __init__(self) -> None:
        self.active = False

    @contextmanager
    def on(self, wanted: bool) -> Iterator[None]:
        before, self.active = self.active, wanted
        try:
            yield
        finally:
            self.active = before


def _part_for(groups: ReplicaGroups, value: Any) -> Any:
    return groups.expert_part if groups.expert_part is not None and value is groups.expert_whole else value


def _mark_replica(value: Any, offset: int) -> None:
    """Move an object of a sharded state dict behind the copies before it. value: ShardedObject, or anything else."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if isinstance(value, ShardedObject) and isinstance(value.replica_id, int):
        value.replica_id += offset


def _broadcast_to_copies(ddp: Any) -> None:
    """Send the first copy's parameters to the others; inside a copy they are equal already."""
    from megatron.core import parallel_state

    group = parallel_state.get_inter_partial_data_parallel_group()
    first = dist.get_process_group_ranks(group)[0]
    for param in ddp.module.parameters():
        dist.broadcast(param.data, src=first, group=group)


def check_prepared() -> None:
    """Refuse to build an optimizer whose arguments nobody checked: it would silently have no copies.

    Raises:
        ConfigError: the script neither calls validate_args nor validate_yaml.
    """
    from megatron.training import get_args

    if not hasattr(get_args(), "tft_copies"):
        raise ConfigError(
            "Megatron's arguments did not pass through validate_args, which sets up the copies of the optimizer state.",
            change="Let the training script call megatron.training.arguments.validate_args.",
        )


def log_cost(optimizer: Any) -> None:
    """Say in one line what the copies cost on this rank."""
    from megatron.core import mpu

    parts = replica_bytes.distributed_optimizers(optimizer)
    if not parts:
        logger.info("optimizer state is not sharded: every rank of the data-parallel group holds a copy already")
        return
    whole = mpu.get_data_parallel_world_size(with_context_parallel=True)
    copies = whole // mpu.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
    # The group of an optimizer is its part: d = size of the part x N, for dense and expert parameters alike.
    sizes = [(one, one.data_parallel_group.size() * copies) for one in parts]
    now = sum(replica_bytes.expected_of(one, size, copies) for one, size in sizes)
    single = sum(replica_bytes.expected_of(one, size, 1) for one, size in sizes)
    logger.info(
        "optimizer copies: %d in a data-parallel group of %d; parameters, gradients and optimizer state of rank 0: "
        "%.1f MiB, %.1f MiB with a single copy: the second copy costs %.1f MiB (%+.1f %%)",
        copies,
        whole,
        now / 2**20,
        single / 2**20,
        (now - single) / 2**20,
        100 * (now - single) / single if single else 0.0,
    )
