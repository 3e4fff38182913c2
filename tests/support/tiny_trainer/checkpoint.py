"""Checkpoints: one file for each shard and one for what all ranks of a tensor-parallel position share.

    <save>/iter_0000005/shard_<tensor-parallel rank>_<position>_of_<shards>.pt
    <save>/iter_0000005/common_<tensor-parallel rank>.pt
    <save>/latest_checkpointed_iteration.txt

The model's parameters are the rounded main parameters, so they are not written. Files cut for another number of shards
can be loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TRACKER = "latest_checkpointed_iteration.txt"


def folder_of(save: Path, step: int) -> Path:
    """Folder of the checkpoint of a step."""
    return save / f"iter_{step:07d}"


def newest(save: Path) -> int:
    """Step of the newest complete checkpoint; 0: there is none."""
    tracker = save / TRACKER
    return int(tracker.read_text()) if tracker.exists() else 0


def write_shard(folder: Path, tensor_rank: int, position: int, shards: int, state: Mapping[str, Any]) -> Path:
    """Write the shard of this rank; the path of its file."""
    return _write(folder / f"shard_{tensor_rank}_{position}_of_{shards}.pt", state)


def write_common(folder: Path, tensor_rank: int, state: Mapping[str, Any]) -> Path:
    """Write what belongs to no shard; the path of its file."""
    return _write(folder / f"common_{tensor_rank}.pt", state)


def _write(path: Path, state: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(state), path)
    return path


def read_shards(folder: Path, tensor_rank: int) -> list[dict[str, torch.Tensor]]:
    """All shards of a tensor-parallel position, in order."""
    paths = sorted(folder.glob(f"shard_{tensor_rank}_*_of_*.pt"), key=lambda path: int(path.stem.split("_")[2]))
    return [torch.load(path, weights_only=True) for path in paths]


def read_common(folder: Path, tensor_rank: int) -> dict[str, Any]:
    """What belongs to no shard."""
    return dict(torch.load(folder / f"common_{tensor_rank}.pt", weights_only=False))


def write_tracker(save: Path, step: int) -> None:
    """Name a complete checkpoint as the newest."""
    fresh = save / f".{TRACKER}"
    fresh.write_text(str(step))
    fresh.replace(save / TRACKER)
