"""Phase dump on the Megatron-LM of 2023: the survivors write the checkpoint of the target step.

The order, and what is guaranteed, is that of adaptors.megatron.dump; files are in this Megatron's own form:

    mp_rank_TT[_PPP]/model_rng.pt        by the first survivor of that model-parallel position
    mp_rank_TT[_PPP]_DDD/optim.pt        by the rank that speaks for shard DDD (checkpoints.py about the number)
    mp_rank_TT[_PPP]/model_optim_rng.pt  without a distributed optimizer: both, by the first survivor
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindio_tft_patch.adaptors.megatron.dump import PROCESS_BEGAN, _Dump, _told_to_all, _without_collector
from mindio_tft_patch.adaptors.megatron_legacy import content
from mindio_tft_patch.adaptors.megatron_legacy.update import replica_groups
from mindio_tft_patch.adaptors.porting import checkpoint_files as files
from mindio_tft_patch.adaptors.porting.survivors import SurvivorsWorld, no_check
from mindio_tft_patch.errors import DumpError
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.messages import Plan

log = logging.getLogger("mindio_tft_patch.dump")


@dataclass(frozen=True)
class Speakers:
    """Who stands for the shards of this rank's model-parallel position.

    ranks: rank that speaks for each shard, in shard order.
    alive: participants that hold any shard of the position, ascending; group: gloo group of them.
    """

    ranks: tuple[int, ...]
    alive: tuple[int, ...]
    group: Any


@dataclass
class _LegacyDump(_Dump):
    """The files of one dump, seen from one rank."""

    own: list[Path] = field(default_factory=list)

    def _own_files(self) -> list[Path]:
        return [*self.own, *self.added]


def write_dump(
    *,
    model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    iteration: int,
    plan: Plan,
    attempt: int,
    args: Any,
    deadline_seconds: float,
    check: Callable[[], None] = no_check,
    extra_files: Mapping[str, bytes] | None = None,
    not_before: float = PROCESS_BEGAN,
) -> Outcome:
    """Write the checkpoint of `iteration`, together with the other participants of the plan.

    Arguments are those of adaptors.megatron.dump.write_dump.

    Returns:
        detail: path of the checkpoint; bytes_moved: bytes that this rank has written.

    Raises:
        DumpError: nothing was published; older checkpoints and the tracker are as before.
    """
    if not args.save:
        raise DumpError("there is no place to save to. Add --save.")
    deadline = time.monotonic() + deadline_seconds
    world = SurvivorsWorld(plan.participants, attempt=attempt, deadline=deadline, check=check)
    job = _LegacyDump(Path(args.save), iteration, args, world, not_before)
    with _without_collector(), world, _told_to_all(world, job):
        speakers = find_speakers(plan, world, sharded=args.use_distributed_optimizer)
        ready = world.from_leader(job.begin)
        if ready is not None:
            log.info("the checkpoint of step %d is complete already: %s", iteration, ready)
            return Outcome(detail=ready)
        job.temporary = Path(world.from_leader(lambda: str(files.make_temporary(job.save, iteration, attempt))))
        refresh_parameters(model, optimizer, speakers)
        index = speakers.ranks.index(world.rank) if world.rank in speakers.ranks else None
        first = speakers.alive[0] == world.rank
        written_here = content.files(
            job.temporary,
            args,
            iteration,
            model=model if first else [],
            optimizer=optimizer,
            scheduler=opt_param_scheduler,
            index=index if args.use_distributed_optimizer or not first else 0,
        )
        for file, state in written_here:
            job.own.append(content.write(file, state))
        job.add_files(dict(extra_files or {}))
        path, written = job.finish()
    log.info("dying-gasp checkpoint of step %d: %s, %d bytes from here", iteration, path, written)
    return Outcome(detail=path, bytes_moved=written)


def find_speakers(plan: Plan, world: SurvivorsWorld, *, sharded: bool) -> Speakers:
    """Who writes, and who can be asked; builds a gloo group: before `world.swap()`.

    Raises:
        DumpError: the plan has no living rank for a shard.
    """
    from megatron.core import mpu

    everyone = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    groups = replica_groups()
    shards = everyone if groups is None else everyone[: groups.size]
    found = []
    for rank in shards if sharded else everyone[:1]:
        source = next((one for one in plan.sources if rank in one.replica_set.ranks), None)
        if source is None or source.source not in world.ranks:
            raise DumpError(f"no healthy rank holds the optimizer shard of rank {rank}")
        found.append(source.source)
    alive = tuple(sorted(set(everyone) & set(world.ranks)))
    return Speakers(tuple(found), alive, world.group("alive", alive))


def refresh_parameters(model: list[Any], optimizer: Any, speakers: Speakers, *, apart: bool = False) -> None:
    """Bring the model's parameters to the state of the main parameters, also those that other ranks have updated.

    Args:
        apart: through memory of its own, not through the buffers of parameters, which are the gradient buffers too:
            for a rank whose training thread is still there.
    """
    with torch.no_grad():
        if not hasattr(optimizer, "param_buffers"):
            copy_to_model = getattr(optimizer, "_copy_main_params_to_model_params", None)
            if copy_to_model is not None:
                copy_to_model()
            return
        for number, buffers in enumerate(optimizer.param_buffers):
            for dtype, buffer in buffers.items():
                whole = torch.zeros_like(buffer) if apart else buffer
                _fill_own(optimizer, number, dtype, whole)
                _share(whole, speakers)
                for parameter, (start, stop) in model[number]._grad_buffer_param_index_map[dtype].items():
                    parameter.data.view(-1).copy_(whole[start:stop])


def _fill_own(optimizer: Any, number: int, dtype: Any, buffer: torch.Tensor) -> None:
    """Copy this rank's main parameters to their places in a buffer. number, dtype: which buffer it is."""
    pairs = [
        (optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups),
        (optimizer.shard_fp32_groups, optimizer.model_fp32_groups),
    ]
    for mains, parameters in pairs:
        for group, owners in zip(mains, parameters, strict=True):
            for main, owner in zip(group, owners, strict=True):
                if optimizer.model_param_gbuf_map[owner] == (number, dtype):
                    place = optimizer.get_model_param_range_map(owner)["gbuf_world"]
                    buffer[place.start : place.end].copy_(main)


def _share(buffer: torch.Tensor, speakers: Speakers) -> None:
    """Broadcast every piece of a buffer from the rank that speaks for it. buffer: [numel_padded]."""
    if len(speakers.alive) == 1:
        return
    for piece, speaker in zip(buffer.chunk(len(speakers.ranks)), speakers.ranks, strict=True):
        # Bytes, because gloo knows no bfloat16; on the host, because its group is gloo whatever the device.
        content = piece.view(torch.uint8)
        on_host = content if content.device.type == "cpu" else content.cpu()
        dist.broadcast(on_host, src=speaker, group=speakers.group)
        if on_host is not content:
            content.copy_(on_host)
