"""Who writes which shard of a torch_dist checkpoint when some ranks are dead.

Megatron gives every ShardedTensor and ShardedObject a replica id, and the holder with all zeros writes it. That holder
may be dead, so the survivors tell each other what they hold and agree on one writer for each shard, so that every one
of them has about the same number of bytes to write. The agreement is a pure function of what was exchanged; every
survivor computes it. It also shows whether the survivors together hold everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Numbers = tuple[int, ...]


class Shard(NamedTuple):
    """One piece of one entry of the checkpoint, as announced by a holder.

    offset: elements (tensor) or pieces (object) before this one, in each dimension.
    extent: shape of the piece; (start, stop) when `flat`; all ones for an object.
    whole: shape of the entire entry, in elements or pieces.
    """

    key: str
    offset: Numbers
    extent: Numbers
    flat: bool
    whole: Numbers
    size_bytes: int  # 0 for an object

    @property
    def identity(self) -> tuple[str, Numbers, Numbers, bool]:
        """Equal for replicas of the same piece."""
        return (self.key, self.offset, self.extent, self.flat)

    @property
    def volume(self) -> int:
        """Elements (or pieces) in it."""
        return self.extent[1] - self.extent[0] if self.flat else math.prod(self.extent)


Identity = tuple[str, Numbers, Numbers, bool]


def assign(held: Sequence[Sequence[Shard]], positions: Sequence[Numbers]) -> dict[Identity, int]:
    """Choose one writer for each shard.

    Args:
        held: what each survivor holds; the position is the survivor's number.
        positions: each survivor's place in the job; objects are written by the holder whose place comes first.

    Returns:
        the number of the writer of each shard. Large shards first, each to its least loaded holder. Objects are small,
        and not always true replicas: Megatron saves the random state of expert-parallel rank 0 for all of them.
    """
    holders: dict[Identity, list[int]] = {}
    sizes: dict[Identity, int] = {}
    for number, shards in enumerate(held):
        for shard in shards:
            ranks = holders.setdefault(shard.identity, [])
            if number not in ranks:
                ranks.append(number)
            sizes[shard.identity] = shard.size_bytes
    load = [0] * len(held)
    chosen: dict[Identity, int] = {}
    for identity in sorted(holders, key=lambda one: (-sizes[one], one)):
        if sizes[identity]:
            writer = min(holders[identity], key=lambda number: (load[number], number))
        else:
            writer = min(holders[identity], key=lambda number: (positions[number], number))
        chosen[identity] = writer
        load[writer] += sizes[identity]
    return chosen


def uncovered(held: Iterable[Iterable[Shard]]) -> list[str]:
    """Keys of which no survivor holds some piece, sorted."""
    present: dict[str, dict[Identity, Shard]] = {}
    for shards in held:
        for shard in shards:
            present.setdefault(shard.key, {})[shard.identity] = shard
    lacking = []
    for key, shards_of_key in present.items():
        whole = math.prod(next(iter(shards_of_key.values())).whole)
        if sum(shard.volume for shard in shards_of_key.values()) != whole:
            lacking.append(key)
    return sorted(lacking)


def sharded_entries(state: Any) -> Iterator[Any]:
    """Every ShardedTensor and ShardedObject of a nested state dict (factories applied), in its order."""
    if isinstance(state, dict):
        for value in state.values():
            yield from sharded_entries(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from sharded_entries(value)
    elif hasattr(state, "replica_id") and hasattr(state, "global_offset"):
        yield state


def describe(entry: Any) -> Shard:
    """What a survivor tells the others of one ShardedTensor or ShardedObject."""
    if not hasattr(entry, "local_shape"):
        ones = (1,) * len(entry.global_shape)
        return Shard(entry.key, tuple(entry.global_offset), ones, False, tuple(entry.global_shape), 0)
    data, flat = entry.data, getattr(entry, "flattened_range", None)
    size = data.numel() * data.element_size() if data is not None else 0
    extent = tuple(entry.local_shape) if flat is None else (int(flat.start), int(flat.stop))
    offset = tuple(entry.global_offset)
    if flat is not None:
        # The range is relative to a local shape, which then is part of the identity.
        offset += tuple(entry.local_shape)
    return Shard(entry.key, offset, extent, flat is not None, tuple(entry.global_shape), size)


def mark(entries: Iterable[Any], chosen: dict[Identity, int], number: int) -> None:
    """Give each entry of this survivor a replica id: 0 where it is the writer, else 1."""
    seen: set[Identity] = set()
    for entry in entries:
        identity = describe(entry).identity
        entry.replica_id = 0 if chosen[identity] == number and identity not in seen else 1
        seen.add(identity)
