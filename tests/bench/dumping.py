"""The rank's side of the dump's benchmark: the dump itself, and torch.save of as many bytes."""

from __future__ import annotations

import logging
import os
import re
import time
from pathlib import Path
from typing import Any

import torch

from mindio_tft_patch.adaptors.megatron import dump
from mindio_tft_patch.adaptors.megatron.groups import replica_sets
from mindio_tft_patch.adaptors.megatron.install import Installation
from mindio_tft_patch.protocol.messages import Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import Strategy


def tell_replica_sets(installation: Installation) -> dict[str, Any]:
    """Replica sets of this rank: {"sets": [[name, ranks], ...]}."""
    return {"sets": [[one.name, list(one.ranks)] for one in replica_sets()]}


def dump_checkpoint(
    installation: Installation, *, save: str, attempt: int, faulty: list[int], alive: list[int], sets: list[Any]
) -> dict[str, Any]:
    """Phase dump, among the ranks in `alive`; the others take no part, as if they were dead.

    save: an empty folder, or one that does not exist.
    """
    session = installation.session
    training, step = session.training, session.board.commit.step
    assert training is not None
    training.args.save = save
    chosen = [next(rank for rank in ranks if rank in alive) for _, ranks in sets]
    sources = [
        ShardSource(ReplicaSet(name, tuple(ranks)), one) for (name, ranks), one in zip(sets, chosen, strict=True)
    ]
    plan = Plan(
        Strategy.DUMP,
        "benchmark",
        target_step=step,
        faulty=tuple(faulty),
        participants=tuple(alive),
        sources=tuple(sources),
    )
    parts = _Parts()
    dump.log.addHandler(parts)
    began = time.perf_counter()
    outcome = dump.write_dump(
        model=training.model,
        optimizer=training.optimizer,
        opt_param_scheduler=training.scheduler,
        iteration=step,
        num_floating_point_operations_so_far=0,
        plan=plan,
        attempt=attempt,
        args=training.args,
        deadline_seconds=300.0,
    )
    seconds = time.perf_counter() - began
    dump.log.removeHandler(parts)
    return {"seconds": seconds, "bytes": outcome.bytes_moved, "parts": parts.seconds}


class _Parts(logging.Handler):
    """Reads from the log line of a finished dump how long each part of it took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Look at a line."""
        found = re.search(r"; seconds: (.*)", record.getMessage())
        if found:
            pairs = (part.split(" ") for part in found[1].split(", "))
            self.seconds = {name: float(seconds) for name, seconds in pairs}


def torch_save(installation: Installation, *, path: str, size: int) -> dict[str, Any]:
    """torch.save of one tensor of `size` bytes, and fsync."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    began = time.perf_counter()
    with Path(path).open("wb") as stream:
        torch.save(data, stream)
        stream.flush()
        os.fsync(stream.fileno())
    return {"seconds": time.perf_counter() - began, "bytes": Path(path).stat().st_size}
