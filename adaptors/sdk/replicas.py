"""What tft_set_optimizer_replica says about who holds what: pure functions of `replica_info`.

`rank_list` is a data-parallel group in order, of which every `replica_cnt` ranks hold the same shard. With n ranks and
c copies there are n / c shards, and the ranks whose places differ by multiples of n / c hold the same one:

    rank_list [0, 2, 4, 6], replica_cnt 2   ->   ranks 0 and 4 hold the same, ranks 2 and 6 hold the same

TTP_FRAMEWORK_TYPE=1 takes the distance from `replica_shift` instead. Under MindSpore `rank_list` names the holders
themselves. One element per optimizer, in the order of OptimizerType.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindio_tft_patch.adaptors.sdk import checks
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.messages import ReplicaSet

_CALL = "tft_set_optimizer_replica"
_FIELDS = ("rank_list", "replica_cnt", "replica_shift")
_NAMES = ("dense", "expert")  # OptimizerType.ATTENTION, OptimizerType.MOE
OPTIMIZERS_MAX = 1000


@dataclass(frozen=True)
class Layout:
    """The shards of one optimizer over one data-parallel group.

    shards: the holders of each shard, ascending; in the order of the shards.
    """

    index: int
    shards: tuple[tuple[int, ...], ...]

    @property
    def name(self) -> str:
        """How replica sets of this optimizer are called in the protocol."""
        return name_of(self.index)

    def replica_set(self, rank: int) -> ReplicaSet:
        """The holders of what `rank` holds."""
        return ReplicaSet(self.name, next(ranks for ranks in self.shards if rank in ranks))


def name_of(index: int) -> str:
    """Name of an optimizer in the protocol."""
    return _NAMES[index] if index < len(_NAMES) else f"optimizer {index}"


def index_of(name: str) -> int:
    """The optimizer that a name of the protocol stands for."""
    return _NAMES.index(name) if name in _NAMES else int(name.rpartition(" ")[2])


def alone(rank: int) -> tuple[Layout, ...]:
    """The layout of a rank that has said nothing: nobody else holds what it holds."""
    return (Layout(0, ((rank,),)),)


def layouts(
    rank: int,
    replica_info: Any,
    *,
    world_size: int = checks.WORLD_SIZE_MAX,
    framework_type: int = 0,
    mindspore: bool = False,
) -> tuple[Layout, ...]:
    """Check `replica_info` and work out who holds what.

    Raises:
        ConfigError: it has not the documented form, or cannot be.
    """
    checks.integer(_CALL, "rank", rank, 0, checks.WORLD_SIZE_MAX - 1)
    if not isinstance(replica_info, list) or not 0 < len(replica_info) <= OPTIMIZERS_MAX:
        raise ConfigError(
            f"{_CALL}: replica_info is {replica_info!r}.",
            change=f"Pass a list of dictionaries with {', '.join(_FIELDS)}, one per optimizer.",
        )
    found = tuple(
        Layout(index, _shards(rank, index, element, framework_type, mindspore))
        for index, element in enumerate(replica_info)
    )
    strangers = {one for element in replica_info for one in element["rank_list"] if one >= world_size}
    if strangers:
        raise ConfigError(
            f"{_CALL}: replica_info names rank {min(strangers)}, but the job has {world_size} ranks.",
            change=f"Name ranks from 0 to {world_size - 1}.",
        )
    return found


def _shards(rank: int, index: int, element: Any, framework_type: int, mindspore: bool) -> tuple[tuple[int, ...], ...]:
    where = f"replica_info[{index}]"
    if not isinstance(element, dict):
        raise ConfigError(f"{_CALL}: {where} is {element!r}.", change=f"Pass a dictionary with {', '.join(_FIELDS)}.")
    ranks = _rank_list(where, element.get("rank_list"), rank)
    copies = checks.integer(_CALL, f"{where}['replica_cnt']", element.get("replica_cnt"), 1, len(ranks))
    shift = checks.integer(
        _CALL, f"{where}['replica_shift']", element.get("replica_shift"), -checks.STEP_END, checks.STEP_END
    )
    if mindspore:
        if copies != len(ranks):
            raise ConfigError(
                f"{_CALL}: {where} names {len(ranks)} ranks and replica_cnt {copies}.",
                change="Under MindSpore rank_list names the holders of this rank's state; replica_cnt is their number.",
            )
        return (tuple(sorted(ranks)),)
    distance = shift if framework_type == 1 else len(ranks) // copies
    if distance < 1 or distance * copies != len(ranks):
        raise ConfigError(
            f"{_CALL}: {where} cannot share {len(ranks)} ranks evenly among {copies} copies"
            + (f" at the distance replica_shift={shift} (TTP_FRAMEWORK_TYPE=1)." if framework_type == 1 else "."),
            change="Choose a data-parallel size that is divisible by the number of copies.",
        )
    return tuple(tuple(sorted(ranks[place::distance])) for place in range(distance))


def _rank_list(where: str, value: Any, rank: int) -> Sequence[int]:
    numbers = isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    if not numbers or not value or min(value) < 0 or len(set(value)) != len(value):
        raise ConfigError(f"{_CALL}: {where}['rank_list'] is {value!r}.", change="Pass a list of different ranks.")
    if rank not in value:
        raise ConfigError(
            f"{_CALL}: {where}['rank_list'] is {value!r}, without rank {rank} itself.",
            change="Pass the data-parallel group that this rank belongs to.",
        )
    return value  # type: ignore[no-any-return]
