"""What a plan means in the SDK's words: `repair_info`, `save_info` and `fault_ranks`. Pure functions of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindio_tft_patch.adaptors.sdk.enums import RepairType
from mindio_tft_patch.adaptors.sdk.replicas import Layout, index_of
from mindio_tft_patch.protocol.messages import Plan
from mindio_tft_patch.protocol.phases import Strategy

REBUILDING = (RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_LOAD_REBUILD)


@dataclass(frozen=True)
class Repair:
    """The arguments of one call of the repair callback, but for step, args and ctx."""

    need_rebuild: bool
    error_ranks: list[int]
    repair_info: dict[str, object]


@dataclass(frozen=True)
class _Unit:
    """One shard that one rank gets from another."""

    optimizer: int
    source: int
    target: int


def repair_type_name(plan: Plan | None) -> str:
    """What tft_get_repair_type returns."""
    if plan is None or plan.strategy is Strategy.EXIT:
        return "unknow"
    if plan.strategy is Strategy.DUMP:
        return "dump"
    return "recover" if connects_anew(plan) else "retry"


def connects_anew(plan: Plan) -> bool:
    """Are the groups to be built anew, with processes that have come back?

    In a reload `plan.faulty` holds those processes only; where every process lives, the clean callback is enough.
    """
    return plan.strategy is Strategy.RESPAWN or (plan.strategy is Strategy.RELOAD and bool(plan.faulty))


def refill(plan: Plan, rank: int, own: RepairType) -> Repair | None:
    """This rank's part in filling the faulty ranks from healthy ones; None: it has none.

    Args:
        own: how this rank is refilled if it is one of the faulty ones.
    """
    units = _units(plan)
    mine = [unit for unit in units if unit.target == rank]
    if mine:
        return _repair(own, mine, units)
    mine = [unit for unit in units if unit.source == rank]
    return _repair(RepairType.RT_SEND, mine, units) if mine else None


def load(plan: Plan, rank: int, layouts: Sequence[Layout], own: RepairType) -> Repair:
    """This rank's part in a reload: every rank loads the last checkpoint, for each of its optimizers."""
    everybody = [_Unit(0, one, one) for one in plan.participants]
    return _repair(own, [_Unit(layout.index, rank, rank) for layout in layouts], everybody)


def save_info(plan: Plan, rank: int, layouts: Sequence[Layout]) -> list[dict[str, object]]:
    """Who saves, for each optimizer of which this rank is to save something; empty: it saves nothing.

    The ranks of one entry hold a complete copy together, and are in the order of the shards.
    """
    speakers = {source.replica_set: source.source for source in plan.sources}
    found: list[dict[str, object]] = []
    for layout in layouts:
        ranks = [speakers.get(layout.replica_set(shard[0])) for shard in layout.shards]
        if rank in ranks:
            found.append({"type": layout.index, "ranks": ranks})
    return found


def savers(plan: Plan) -> list[int]:
    """All ranks that save something, ascending."""
    return sorted({source.source for source in plan.sources})


def _units(plan: Plan) -> list[_Unit]:
    """In an order that is the same on every rank, so that sends and receives meet."""
    units = [
        (index_of(one.replica_set.name), one.replica_set.ranks, target, one.source)
        for one in plan.sources
        for target in one.replica_set.ranks
        if target in plan.faulty
    ]
    return [_Unit(optimizer, source, target) for optimizer, _, target, source in sorted(units)]


def _repair(kind: RepairType, mine: Sequence[_Unit], everybody: Sequence[_Unit]) -> Repair:
    targets = [unit.target for unit in mine]
    return Repair(
        need_rebuild=kind in REBUILDING,
        error_ranks=targets,
        repair_info={
            "type": [unit.optimizer for unit in mine],
            "repair_type": kind.value,
            "src": [unit.source for unit in mine],
            "dst": targets,
            "rank_list": sorted({rank for unit in everybody for rank in (unit.source, unit.target)}),
        },
    )
