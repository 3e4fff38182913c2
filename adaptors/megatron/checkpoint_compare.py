"""Reads Megatron checkpoints without a running job, and says where two of them differ, bit by bit.

Content is compared, not files: a checkpoint that three survivors wrote is split over its files in another way than one
that four ranks wrote. `torch` format: every .pt file. `torch_dist` format: every tensor put together from its shards.
Loading unpickles what Megatron has pickled: read checkpoints of your own jobs only.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

# Megatron's arguments that may differ: the rank that saved, and where to.
PERSONAL_ARGUMENTS = ("rank", "local_rank", "save")


def read(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint folder (`iter_0000012`), by name.

    Raises:
        FileNotFoundError: the folder holds no checkpoint.
    """
    if not (folder / ".metadata").exists():
        paths = sorted(folder.rglob("*.pt"))
        if not paths:
            raise FileNotFoundError(f"{folder} holds no checkpoint: neither .metadata nor any .pt file")
        return {str(one.relative_to(folder)): torch.load(one, weights_only=False) for one in paths}
    reader = FileSystemReader(folder)
    state: dict[str, Any] = {}
    for key, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            state[key] = BytesIO()
        else:
            # NaN shows a hole in the shards; NaN is equal to NaN here, so a hole must be in both to go unnoticed.
            state[key] = torch.full(entry.size, float("nan") if entry.properties.dtype.is_floating_point else 0)
            state[key] = state[key].to(entry.properties.dtype)
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    for key, value in state.items():
        if isinstance(value, BytesIO):
            value.seek(0)
            state[key] = torch.load(value, weights_only=False)
    for one in folder.glob("*.pt"):
        state[one.name] = torch.load(one, weights_only=False)
    return state


def differences(  # noqa: PLR0912 - one branch for each kind of value
    one: Any, other: Any, where: str = "", *, ignore: Collection[str] = PERSONAL_ARGUMENTS
) -> Iterator[str]:
    """Paths at which two states are not equal bit by bit.

    Args:
        where: path of the two states, in front of everything that is reported.
        ignore: names of Megatron's arguments (the namespace in a checkpoint) that may differ.
    """
    one, other = (_plain(this, ignore) for this in (one, other))
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            yield f"{where}: {one.dtype}{tuple(one.shape)} is not {other.dtype}{tuple(other.shape)}"
        elif not same_bits(one, other):
            yield f"{where}: other values"
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key not in one or key not in other:
                yield f"{where}/{key}: only in {'the first' if key in one else 'the second'}"
            else:
                yield from differences(one[key], other[key], f"{where}/{key}", ignore=ignore)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} items are not {len(other)}"
        for number, (left, right) in enumerate(zip_longest(one, other)):
            yield from differences(left, right, f"{where}/{number}", ignore=ignore)
    elif isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            yield f"{where}: other values"
    elif isinstance(one, float) and isinstance(other, float):
        # By bits: NaN is equal to itself, and 0.0 is not -0.0.
        if np.float64(one).tobytes() != np.float64(other).tobytes():
            yield f"{where}: {one!r} is not {other!r}"
    elif type(one) is not type(other) or one != other:
        yield f"{where}: {one!r:.80} is not {other!r:.80}"


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal including the sign of zero and NaN payloads."""
    left, right = (this.detach().contiguous().reshape(-1).view(torch.uint8) for this in (one, other))
    return bool(torch.equal(left, right))


def _plain(value: Any, ignore: Collection[str]) -> Any:
    """Something whose parts can be compared: dictionaries instead of namespaces and of Megatron's own objects."""
    if isinstance(value, argparse.Namespace):
        # Arguments hold enums, functions and types; their text says what they are.
        return {key: str(item) for key, item in vars(value).items() if key not in ignore}
    if isinstance(value, BytesIO):
        return value.getvalue()
    if type(value).__module__.startswith("megatron") and hasattr(value, "__dict__"):
        return {"type": str(type(value)), **{key: str(item) for key, item in vars(value).items()}}
    return value
