"""Survivors agree on one writer for each shard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mindio_tft_patch.adaptors.megatron.promote import Shard, assign, uncovered


def tensor(key: str, offset: int, length: int, whole: int) -> Shard:
    return Shard(key, (offset,), (length,), False, (whole,), 4 * length)


def thing(key: str) -> Shard:
    return Shard(key, (0,), (1,), False, (1,), 0)


FIRST, SECOND = tensor("w", 0, 4, 8), tensor("w", 4, 4, 8)


def test_a_shard_goes_to_its_only_holder() -> None:
    assert assign([[FIRST], [SECOND]], [(0,), (1,)]) == {FIRST.identity: 0, SECOND.identity: 1}


def test_replicas_are_spread_over_their_holders() -> None:
    chosen = assign([[FIRST, SECOND], [FIRST, SECOND]], [(0,), (1,)])
    assert sorted(chosen.values()) == [0, 1]


def test_an_object_goes_to_the_holder_whose_place_comes_first() -> None:
    one = thing("rng")
    assert assign([[one], [one], [one]], [(1, 0), (0, 2), (0, 3)]) == {one.identity: 1}


def test_survivors_that_hold_everything_cover_it() -> None:
    assert uncovered([[FIRST], [FIRST, SECOND]]) == []


def test_a_piece_that_only_dead_ranks_held_is_named() -> None:
    assert uncovered([[FIRST, tensor("v", 0, 2, 2)], [FIRST]]) == ["w"]


def test_flattened_ranges_are_counted_by_their_length() -> None:
    low = Shard("w", (0, 8), (0, 5), True, (8,), 20)
    high = Shard("w", (0, 8), (5, 8), True, (8,), 12)
    assert uncovered([[low], [high]]) == []
    assert uncovered([[low]]) == ["w"]


@given(st.lists(st.lists(st.integers(0, 7), max_size=8), min_size=1, max_size=5))
def test_every_shard_has_exactly_one_writer_and_the_writer_holds_it(pieces: list[list[int]]) -> None:
    held = [[tensor("w", number, 1, 8) for number in one] for one in pieces]
    chosen = assign(held, [(number,) for number in range(len(held))])
    assert set(chosen) == {shard.identity for one in held for shard in one}
    for identity, writer in chosen.items():
        assert identity in {shard.identity for shard in held[writer]}
