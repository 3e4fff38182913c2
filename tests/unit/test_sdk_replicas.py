"""tft_set_optimizer_replica: who holds the same as whom, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mindio_tft_patch.adaptors.sdk.replicas import alone, index_of, layouts, name_of
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.protocol.messages import ReplicaSet


def info(ranks: Any, copies: Any, shift: Any = 0) -> dict[str, Any]:
    return {"rank_list": ranks, "replica_cnt": copies, "replica_shift": shift}


def test_ranks_half_a_group_apart_hold_the_same() -> None:
    (dense,) = layouts(2, [info([0, 2, 4, 6], 2)])
    assert dense.shards == ((0, 4), (2, 6))
    assert dense.replica_set(2) == ReplicaSet("dense", (2, 6))


def test_where_every_rank_has_a_copy_all_hold_the_same() -> None:
    (dense,) = layouts(4, [info([0, 2, 4], 3)])
    assert dense.shards == ((0, 2, 4),)


def test_without_a_second_copy_every_rank_is_alone() -> None:
    (dense,) = layouts(1, [info([0, 1], 1)])
    assert dense.shards == ((0,), (1,))


def test_the_order_of_the_shards_is_that_of_the_list_and_ranks_in_one_ascend() -> None:
    (dense,) = layouts(0, [info([6, 2, 0, 4], 2)])
    assert dense.shards == ((0, 6), (2, 4))


def test_each_optimizer_has_a_layout_and_a_name() -> None:
    found = layouts(1, [info([0, 1], 2), info([1, 3], 2), info([1], 1)])
    assert [layout.name for layout in found] == ["dense", "expert", "optimizer 2"]
    assert [index_of(layout.name) for layout in found] == [0, 1, 2]
    assert name_of(1) == "expert"


def test_another_framework_type_takes_the_distance_from_the_shift() -> None:
    (dense,) = layouts(1, [info([0, 1, 2, 3], 2, 2)], framework_type=1)
    assert dense.shards == ((0, 2), (1, 3))
    with pytest.raises(ConfigError, match="replica_shift=1"):
        layouts(1, [info([0, 1, 2, 3], 2, 1)], framework_type=1)


def test_under_mindspore_the_list_names_the_holders() -> None:
    (dense,) = layouts(4, [info([4, 0], 2)], mindspore=True)
    assert dense.shards == ((0, 4),)
    with pytest.raises(ConfigError, match="names 2 ranks and replica_cnt 1"):
        layouts(4, [info([4, 0], 1)], mindspore=True)


def test_a_rank_that_has_said_nothing_is_alone() -> None:
    assert alone(3)[0].replica_set(3) == ReplicaSet("dense", (3,))


@pytest.mark.parametrize(
    ("rank", "replica_info", "said"),
    [
        (-1, [info([0], 1)], "rank is -1"),
        (100_000, [info([0], 1)], "from 0 to 99999"),
        (0, [], "Pass a list of dictionaries"),
        (0, {}, "Pass a list of dictionaries"),
        (0, [[0]], "Pass a dictionary"),
        (0, [{}], "rank_list"),
        (0, [info([], 1)], "rank_list"),
        (0, [info([0, 0], 1)], "different ranks"),
        (0, [info([0, "1"], 1)], "rank_list"),
        (0, [info([0, -1], 1)], "rank_list"),
        (0, [info((0, 1), 1)], "rank_list"),
        (0, [info([1, 2], 1)], "without rank 0 itself"),
        (0, [info([0, 1], 0)], "replica_cnt"),
        (0, [info([0, 1], 3)], "from 1 to 2"),
        (0, [info([0, 1], None)], "replica_cnt"),
        (0, [info([0, 1], 2, None)], "replica_shift"),
        (0, [info([0, 1, 2], 2)], "cannot share 3 ranks evenly among 2 copies"),
    ],
)
def test_what_cannot_be_is_refused_in_words(rank: int, replica_info: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layouts(rank, replica_info)


def test_ranks_that_the_job_has_not_are_refused() -> None:
    assert layouts(1, [info([0, 1], 2)], world_size=2)
    with pytest.raises(ConfigError, match="names rank 7, but the job has 2 ranks"):
        layouts(1, [info([0, 1, 8, 7], 2)], world_size=2)
