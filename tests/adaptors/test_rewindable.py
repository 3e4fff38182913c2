"""The data iterator that goes back, or on, to any step that a recovery can choose."""

from __future__ import annotations

import copy
import itertools

import pytest

from mindio_tft_patch.adaptors.porting import RecoveryError, Rewindable


def take(one: Rewindable, count: int) -> list[int]:
    return [next(one) for _ in range(count)]


def test_what_was_taken_for_a_step_that_was_not_completed_is_handed_out_again() -> None:
    one = Rewindable(iter(range(10)))
    assert take(one, 3) == [0, 1, 2]
    one.advance(1)
    assert take(one, 2) == [3, 4]
    one.rewind(1)
    assert take(one, 4) == [3, 4, 5, 6]


def test_a_filled_rank_goes_on_behind_the_step_that_it_has_not_completed_itself() -> None:
    one = Rewindable(iter(range(10)), 7)
    assert take(one, 2) == [0, 1]  # for step 8, whose update fails here; the others complete it
    for _ in range(2):  # the recovery has a second attempt
        one.rewind(8)
    assert take(one, 2) == [2, 3]
    one.advance(9)
    assert take(one, 1) == [4]


def test_a_rank_that_alone_has_completed_a_step_reads_it_again() -> None:
    one = Rewindable(iter(range(10)))
    take(one, 2)
    one.advance(1)
    assert take(one, 3) == [2, 3, 4]
    one.advance(2)
    one.rewind(1)
    assert take(one, 4) == [2, 3, 4, 5]


def test_rewinding_twice_in_a_row_and_in_the_middle_of_a_repetition() -> None:
    one = Rewindable(iter(range(10)))
    assert take(one, 3) == [0, 1, 2]
    one.rewind(0)
    one.rewind(0)
    assert next(one) == 0
    one.rewind(0)
    assert take(one, 5) == [0, 1, 2, 3, 4]


def test_a_step_that_takes_less_the_second_time_leaves_the_rest_for_the_next_one() -> None:
    one = Rewindable(iter(range(10)))
    assert take(one, 3) == [0, 1, 2]
    one.rewind(0)
    assert take(one, 1) == [0]
    one.advance(1)
    one.rewind(1)
    assert take(one, 3) == [1, 2, 3]


def test_what_training_does_to_a_batch_is_not_seen_the_second_time() -> None:
    one = Rewindable(iter([{"tokens": 1}]))
    for _ in range(3):
        batch = next(one)
        assert batch == {"tokens": 1}
        batch["tokens"] = 2
        one.rewind(0)


def test_a_process_that_has_come_back_cannot_forget_to_position_its_iterator() -> None:
    one = Rewindable(iter(range(10)))
    for step in (1, 2, 8):
        with pytest.raises(RecoveryError, match=r"cannot go on behind step \d.*position a new iterator.*replace"):
            one.rewind(step)
    one.replace(iter(range(100, 110)), 8)
    one.rewind(8)
    assert take(one, 1) == [100]


def test_a_step_of_which_nothing_is_kept_any_more_is_refused() -> None:
    one = Rewindable(iter(range(10)))
    for step in (1, 2, 3):
        next(one)
        one.advance(step)
    with pytest.raises(RecoveryError, match="steps 2 to 4"):
        one.rewind(1)
    with pytest.raises(ValueError, match=r"advance\(2\) after step 3"):
        one.advance(2)


def test_no_more_than_the_last_completed_step_and_the_one_under_way_are_kept() -> None:
    one = Rewindable(itertools.count())
    for step in range(1, 50):
        take(one, 4)
        one.advance(step)
    take(one, 4)
    assert len(one._kept) == 8


def test_everything_else_is_asked_of_the_inner_iterator_and_copies_can_be_made() -> None:
    class Inner:
        name = "loader"

        def __next__(self) -> int:
            return 0

        def __iter__(self) -> Inner:
            return self

    one = Rewindable(Inner())
    assert iter(one) is one and one.name == "loader" and copy.copy(one).name == "loader"
    assert not hasattr(one, "length")
