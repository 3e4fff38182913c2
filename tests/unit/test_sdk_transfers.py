"""What a plan becomes for the callbacks: repair_info, save_info, and the name of the repair."""

from __future__ import annotations

import msgspec
import pytest

from mindio_tft_patch.adaptors.sdk import transfers
from mindio_tft_patch.adaptors.sdk.enums import RepairType
from mindio_tft_patch.adaptors.sdk.replicas import layouts
from mindio_tft_patch.protocol.messages import Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import Strategy

DENSE = {"rank_list": [0, 1, 2, 3], "replica_cnt": 2, "replica_shift": 0}
SOURCES = (
    ShardSource(ReplicaSet("dense", (0, 2)), 0),
    ShardSource(ReplicaSet("dense", (1, 3)), 1),
    ShardSource(ReplicaSet("expert", (0, 1)), 0),
    ShardSource(ReplicaSet("expert", (2, 3)), 2),
)


def expert(rank: int) -> dict[str, object]:
    return {"rank_list": [0, 1] if rank < 2 else [2, 3], "replica_cnt": 2, "replica_shift": 0}


def plan(strategy: Strategy = Strategy.RETRY, *faulty: int) -> Plan:
    return Plan(strategy, "test", target_step=7, faulty=faulty, participants=(0, 1, 2, 3), sources=SOURCES)


def test_a_rank_is_filled_for_each_of_its_optimizers_from_the_holder_of_the_same() -> None:
    repair = transfers.refill(plan(Strategy.RETRY, 3), 3, RepairType.RT_UCE_HIGHLEVEL)
    assert repair is not None and repair.need_rebuild and repair.error_ranks == [3, 3]
    assert repair.repair_info == {
        "type": [0, 1],
        "repair_type": RepairType.RT_UCE_HIGHLEVEL.value,
        "src": [1, 2],
        "dst": [3, 3],
        "rank_list": [1, 2, 3],
    }


def test_senders_and_receivers_agree_on_who_sends_what_in_which_order() -> None:
    asked = plan(Strategy.RESPAWN, 1, 3)
    asked = msgspec.structs.replace(asked, sources=(ShardSource(ReplicaSet("dense", (0, 1, 2, 3)), 0), *SOURCES[2:]))
    repairs = {rank: transfers.refill(asked, rank, RepairType.RT_RECV_REPAIR) for rank in range(4)}
    sent, received = [], []
    for rank, repair in repairs.items():
        assert repair is not None
        infos = repair.repair_info
        units = list(zip(infos["type"], infos["src"], infos["dst"], strict=True))  # type: ignore[call-overload]
        (sent if infos["repair_type"] == RepairType.RT_SEND.value else received).extend(units)
        assert infos["rank_list"] == [0, 1, 2, 3]
        assert all(rank in unit[1:] for unit in units)
    assert sorted(sent) == sorted(received) == [(0, 0, 1), (0, 0, 3), (1, 0, 1), (1, 2, 3)]
    first = repairs[0]
    assert first is not None and first.repair_info["dst"] == [1, 3, 1]
    assert not first.need_rebuild


def test_a_rank_that_neither_sends_nor_receives_has_no_part() -> None:
    assert transfers.refill(plan(Strategy.RETRY, 3), 0, RepairType.RT_RECV_REPAIR) is None
    assert transfers.refill(plan(Strategy.RETRY), 1, RepairType.RT_RECV_REPAIR) is None


def test_in_a_reload_every_rank_loads_all_that_it_holds() -> None:
    both = layouts(2, [DENSE, expert(2)])
    repair = transfers.load(plan(Strategy.RELOAD), 2, both, RepairType.RT_LOAD_REBUILD)
    assert repair.need_rebuild and repair.error_ranks == [2, 2]
    assert repair.repair_info == {
        "type": [0, 1],
        "repair_type": RepairType.RT_LOAD_REBUILD.value,
        "src": [2, 2],
        "dst": [2, 2],
        "rank_list": [0, 1, 2, 3],
    }
    assert not transfers.load(plan(Strategy.RELOAD), 2, both, RepairType.RT_LOAD_CKPT).need_rebuild


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [{"type": 0, "ranks": [0, 1]}, {"type": 1, "ranks": [0]}]),
        (1, [{"type": 0, "ranks": [0, 1]}]),
        (2, [{"type": 1, "ranks": [2]}]),
        (3, []),
    ],
)
def test_ranks_save_what_they_speak_for_and_know_who_saves_with_them(rank: int, expected: list[object]) -> None:
    assert transfers.save_info(plan(Strategy.DUMP), rank, layouts(rank, [DENSE, expert(rank)])) == expected


def test_the_savers_are_all_that_speak_for_something() -> None:
    assert transfers.savers(plan(Strategy.DUMP)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("strategy", "faulty", "name", "connects"),
    [
        (Strategy.RETRY, (1,), "retry", False),
        (Strategy.RESPAWN, (1,), "recover", True),
        (Strategy.RESPAWN, (), "recover", True),
        (Strategy.RELOAD, (), "retry", False),
        (Strategy.RELOAD, (1,), "recover", True),
        (Strategy.DUMP, (), "dump", False),
        (Strategy.EXIT, (), "unknow", False),
    ],
)
def test_the_repair_has_the_documented_name(
    strategy: Strategy, faulty: tuple[int, ...], name: str, connects: bool
) -> None:
    asked = plan(strategy, *faulty)
    assert transfers.repair_type_name(asked) == name
    assert transfers.connects_anew(asked) is connects


def test_without_a_recovery_the_repair_is_not_known() -> None:
    assert transfers.repair_type_name(None) == "unknow"
