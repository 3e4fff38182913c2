"""The holders of a distributed optimizer's shards that are still alive, and what they do for each other in a dump.

A distributed optimizer is sharded over a group; with replicas there are several such groups, and the member at one
position of each holds the same shard. The plan names the ranks of every replica set and the one that speaks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld
from mindio_tft_patch.errors import DumpError
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.dump")

_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class ShardHolders:
    """One sharded optimizer, seen from this rank.

    name: "dense" or "expert", as in the replica sets.
    speakers: rank that speaks for each shard, in shard order.
    alive: participants that hold any shard, ascending.
    speakers_group: gloo group of the speakers in shard order; None when this rank is none of them.
    alive_group: gloo group of `alive`.
    """

    optimizer: Any
    name: str
    speakers: tuple[int, ...]
    alive: tuple[int, ...]
    speakers_group: Any
    alive_group: Any


class _Silent:
    """Stands for the group of an optimizer whose shard another rank writes: never rank 0, which is the one to write."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return max(1, int(self._group.rank()))

    def size(self) -> int:
        return int(self._group.size())


def parts(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that have parameters on this rank."""
    if optimizer is None:
        return []
    return [part for part in leaf_optimizers(optimizer) if not getattr(part, "is_stub_optimizer", False)]


def is_sharded(part: Any) -> bool:
    """Is it a distributed optimizer?"""
    return hasattr(part, "get_parameter_state_dp_zero") and hasattr(part, "gbuf_ranges")


def find_holders(optimizer: Any, plan: Plan, world: SurvivorsWorld) -> list[ShardHolders]:
    """The holders of each sharded optimizer of this rank. Builds gloo groups: before `world.swap()`.

    Raises:
        DumpError: the plan has no living rank for a shard.
    """
    found = []
    for number, part in enumerate(one for one in parts(optimizer) if is_sharded(one)):
        name = _name(part)
        sources = [source for source in plan.sources if source.replica_set.name == name]
        speakers, alive = [], set[int]()
        for position, rank in enumerate(dist.get_process_group_ranks(part.data_parallel_group)):
            source = next((one for one in sources if rank in one.replica_set.ranks), None)
            if source is None or source.source not in world.ranks:
                raise DumpError(f"no healthy rank holds {name} shard {position} (replica set of rank {rank})")
            speakers.append(source.source)
            alive.update(set(source.replica_set.ranks) & set(world.ranks))
        ranks = tuple(sorted(alive))
        found.append(
            ShardHolders(
                optimizer=part,
                name=name,
                speakers=tuple(speakers),
                alive=ranks,
                alive_group=world.group(f"{number}-{name}-alive", ranks),
                speakers_group=world.group(f"{number}-{name}-speak", speakers) if world.rank in speakers else None,
            )
        )
    return found


def refresh_parameters(optimizer: Any, holders: list[ShardHolders]) -> None:
    """Bring the model's parameters to the state of the main parameters, also those that other ranks have updated.

    A fault may have come after the local update and before, or during, the all-gather of the parameters.
    """
    for part in parts(optimizer):
        copy_to_model: Callable[[], None] | None = getattr(part, "_copy_main_params_to_model_params", None)
        if copy_to_model is not None:
            copy_to_model()
    for one in holders:
        for buffer in one.optimizer.buffers:
            for bucket in buffer.buckets:
                if bucket.param_data is not None:
                    _share(bucket.param_data, one)


@contextmanager
def speaking(holders: list[ShardHolders], *, to_one_file: bool) -> Iterator[None]:
    """Make each optimizer gather among the speakers of its shards while the block runs.

    Args:
        to_one_file: rank 0 of the group is going to write the whole state (`torch` format).
    """
    with ExitStack() as undo:
        for one in holders:
            _speak(one, to_one_file, undo)
        yield


def _speak(one: ShardHolders, to_one_file: bool, undo: ExitStack) -> None:
    part, group = one.optimizer, one.speakers_group

    def replace(name: str, value: Any) -> None:
        if name in vars(part):
            undo.callback(setattr, part, name, vars(part)[name])
        else:
            undo.callback(delattr, part, name)
        setattr(part, name, value)

    original = part.get_parameter_state_dp_zero

    def gather(*args: Any, **kwargs: Any) -> Any:
        if group is None:
            return None
        if "use_gloo_comm" in kwargs or args:
            # The survivors' groups are gloo, whatever the device.
            kwargs["use_gloo_comm"], args = True, args[1:]
        return original(*args, **kwargs)

    replace("get_parameter_state_dp_zero", gather)
    # Where Megatron lets only the first of several copies write, the speakers are that copy now.
    replace("distributed_optimizer_instance_id", 1 if group is None else 0)
    if group is not None:
        replace("data_parallel_group", group)
        replace("data_parallel_group_gloo", group)
    elif to_one_file:
        replace("data_parallel_group", _Silent(part.data_parallel_group))


def _name(part: Any) -> str:
    dense = any(getattr(parameter, "allreduce", True) for buffer in part.buffers for parameter in buffer.params)
    return "dense" if dense else "expert"


def _share(data: torch.Tensor, one: ShardHolders) -> None:
    """Broadcast every shard of a bucket from its speaker. data: [bucket_numel], equal shards in group order."""
    if len(one.alive) == 1:
        return
    length = data.numel() // len(one.speakers)
    for position, speaker in enumerate(one.speakers):
        shard = data[position * length : (position + 1) * length].view(torch.uint8)
        for start in range(0, shard.numel(), _CHUNK_BYTES):
            chunk = shard[start : start + _CHUNK_BYTES]
            # gloo works on host memory; in chunks, because the device may have no room for a second copy.
            on_host = chunk if chunk.device.type == "cpu" else chunk.cpu()
            dist.broadcast(on_host, src=speaker, group=one.alive_group)
            if on_host is not chunk:
                chunk.copy_(on_host)
