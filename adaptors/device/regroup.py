"""Rebuilds every process group in place: the ProcessGroup objects stay, their connections are made anew.

torch's `ProcessGroup.reconfigure` (2.14, gloo) makes a new communicator inside an existing group object, also when
collectives of the old one are stuck and when a member is a new process. It needs the handles of all members and a
number that no earlier rebuild has used. Megatron keeps references to its groups in many places; all stay valid.

A group is known to its members by its name: ranks that run the same program make the same groups in the same order,
and torch numbers them. A process that has come back has run the same set-up as the one before it.
"""

from __future__ import annotations

import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from mindio_tft_patch.errors import RecoveryError

log = logging.getLogger("mindio_tft_patch.rebuild")

# One group of a dead peer costs this much before the attempt is given up; a live peer answers in milliseconds.
GROUP_SECONDS = 10.0
_POLL_SECONDS = 0.01
# Groups that a recovery has made for itself (survivors.py) and that nobody uses any more.
OWN_PREFIX = "tft-"

# What of a group is rebuilt: by a suffix of the group's name, the group itself or one of its backends.
Parts = Callable[[Any], Mapping[str, Any]]


def missing_support() -> str:
    """Why groups cannot be rebuilt in place with this torch; empty when they can."""
    if not hasattr(dist.ProcessGroup, "reconfigure") or not hasattr(dist.ProcessGroup, "get_reconfigure_handle"):
        return "this torch cannot rebuild a process group in place (ProcessGroup.reconfigure, from torch 2.14 on)"
    if dist.get_debug_level() == dist.DebugLevel.DETAIL:
        return "with TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps process groups, which then cannot be rebuilt in place"
    return ""


def whole(group: Any) -> dict[str, Any]:
    """The group itself; torch refuses one with several backends."""
    return {"": group}


def backends(group: Any) -> dict[str, Any]:
    """Each backend of a group; by device type where there are several."""
    found: dict[str, Any] = {}
    for device in group._device_types:
        backend = group._get_backend(device)
        if all(backend is not other for other in found.values()):
            found[device.type] = backend
    return found if len(found) > 1 else dict(zip([""], found.values(), strict=False))


def unsupported(parts: Parts = whole) -> list[str]:
    """Names of groups, or parts of them, whose backend cannot be rebuilt in place."""
    return [name for name, (_, part) in _parts(parts).items() if not part.supports_reconfigure]


def rebuild_groups(
    attempt: int,
    members: Sequence[int],
    *,
    deadline: float,
    check: Callable[[], None] = lambda: None,
    parts: Parts = whole,
    group_seconds: float = GROUP_SECONDS,
) -> int:
    """Make the connections of all groups of this rank anew, together with every other rank.

    Args:
        attempt: number of the recovery; every rank uses the same.
        members: all ranks of the job.
        deadline: monotonic seconds by which all must be there.
        check: called while waiting; raises to give up.
        parts: what of each group; nothing of it: the group is left as it is.
        group_seconds: limit for one group.

    Returns:
        Number of groups, or parts of groups, rebuilt.

    Raises:
        RecoveryError: ranks have different groups, or one did not come.
    """
    chosen = _parts(parts)
    everyone = _exchange(attempt, members, chosen, deadline=deadline, check=check)
    for name in sorted(chosen):
        group, part = chosen[name]
        options = c10d.ReconfigureOptions()
        options.uuid = zlib.crc32(f"{attempt}/{name}".encode())
        options.handles = [_handle(everyone, rank, name) for rank in dist.get_process_group_ranks(group)]
        options.timeout = timedelta(seconds=group_seconds)
        check()
        try:
            part.reconfigure(options).wait()
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise RecoveryError(
                "rebuild", f"process group {name} could not be connected: {first_line}", collateral=True
            ) from error
    return len(chosen)


def groups() -> dict[str, Any]:
    """The groups of this rank, by name."""
    names = c10d._world.pg_names
    return {names[group]: group for group in list(c10d._world.pg_map) if not names[group].startswith(OWN_PREFIX)}


def _parts(parts: Parts) -> dict[str, tuple[Any, Any]]:
    """Group and part, by name and suffix."""
    return {
        f"{name}/{suffix}" if suffix else name: (group, part)
        for name, group in groups().items()
        for suffix, part in parts(group).items()
    }


def _exchange(
    attempt: int,
    members: Sequence[int],
    chosen: dict[str, tuple[Any, Any]],
    *,
    deadline: float,
    check: Callable[[], None],
) -> dict[int, dict[str, str]]:
    """The handles of every rank's groups, through the job's store: by rank, by name."""
    store, prefix = c10d._get_default_store(), f"tft-rebuild/{attempt}"
    mine = {name: part.get_reconfigure_handle() for name, (_, part) in chosen.items()}
    store.set(f"{prefix}/{dist.get_rank()}", json.dumps(mine))
    keys = {rank: f"{prefix}/{rank}" for rank in members}
    # Before anything that blocks: a rank that is gone is found with a readable message.
    while not store.check(list(keys.values())):
        check()
        if time.monotonic() >= deadline:
            absent = [rank for rank, key in keys.items() if not store.check([key])]
            raise RecoveryError("rebuild", f"ranks {absent} did not come", collateral=True)
        time.sleep(_POLL_SECONDS)
    return {rank: json.loads(store.get(key)) for rank, key in keys.items()}


def _handle(everyone: dict[int, dict[str, str]], rank: int, name: str) -> str:
    try:
        return everyone[rank][name]
    except KeyError:
        raise RecoveryError(
            "rebuild",
            f"rank {rank} has no process group {name}, which this rank shares with it: the ranks have not made the "
            "same groups in the same order",
        ) from None
