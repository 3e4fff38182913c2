"""Who shares a shard with whom."""

from __future__ import annotations

import logging

import pytest

from mindio_tft_patch.adaptors.porting.replica_layout import holders, parts, warn_of_shared_nodes
from mindio_tft_patch.protocol.messages import ReplicaSet


def test_a_group_falls_into_contiguous_parts() -> None:
    assert parts([0, 2, 4, 6], 2) == [[0, 2], [4, 6]]
    assert parts([1, 3, 5, 7, 9, 11], 3) == [[1, 3], [5, 7], [9, 11]]
    assert parts([5], 1) == [[5]]


@pytest.mark.parametrize(
    ("ranks", "copies", "rank", "expected"),
    [
        ([0, 1, 2, 3], 2, 1, (1, 3)),
        ([0, 1, 2, 3], 4, 1, (0, 1, 2, 3)),
        ([0, 1, 2, 3], 1, 1, (1,)),
        ([4, 6, 8, 10], 2, 10, (6, 10)),
    ],
)
def test_rank_i_shares_with_the_same_place_in_every_part(
    ranks: list[int], copies: int, rank: int, expected: tuple[int, ...]
) -> None:
    assert holders(ranks, copies, rank) == expected


def test_every_shard_has_as_many_holders_as_copies_and_all_agree() -> None:
    ranks = list(range(3, 27, 2))
    for copies in (1, 2, 3, 4, 6, 12):
        for rank in ranks:
            together = holders(ranks, copies, rank)
            assert len(together) == copies
            assert all(holders(ranks, copies, other) == together for other in together)


@pytest.mark.parametrize(("ranks_per_node", "warned"), [(4, True), (2, False), (0, False)])
def test_copies_on_one_node_are_warned_of(ranks_per_node: int, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mindio_tft_patch.replica"):
        warn_of_shared_nodes([ReplicaSet("dense", (0, 2))], ranks_per_node)
    assert bool(caplog.records) is warned
