"""The marks around the optimizer update, and what they mean for the state."""

from __future__ import annotations

from typing import Any

import pytest

from mindio_tft_patch.adaptors.sdk.updates import ForceStopError, Updates
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState
from mindio_tft_patch.protocol.phases import Activity


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard()


@pytest.fixture
def updates(board: ProgressBoard) -> Updates:
    return Updates(board)


def test_a_step_is_complete_when_its_update_has_ended(updates: Updates, board: ProgressBoard) -> None:
    updates.start(-1)
    assert board.commit == CommitState(step=0, updating=1)
    assert board.activity is Activity.UPDATE
    updates.end(1)
    assert updates.commit() == board.commit == CommitState(step=1)
    assert (updates.step, board.activity) == (1, Activity.COMPUTE)


def test_a_state_half_way_through_an_update_cannot_be_used(updates: Updates) -> None:
    updates.start(-1)
    updates.end(4)
    updates.start(-1)
    assert updates.commit() is None
    assert not updates.holds(4) and not updates.holds(5)


def test_a_copy_of_before_can_be_used_when_copies_are_kept(updates: Updates) -> None:
    updates.local_copy = True
    updates.copy()
    updates.start(4)
    assert updates.commit() == CommitState(step=4)
    assert updates.holds(4)


def test_without_copies_the_backup_step_says_nothing(updates: Updates) -> None:
    updates.start(4)
    assert updates.commit() is None


def test_after_the_update_either_step_can_be_had(updates: Updates) -> None:
    updates.local_copy = True
    updates.start(4)
    updates.end(5)
    assert updates.holds(5) and updates.holds(4) and not updates.holds(3)
    updates.start(-1)
    updates.end(6)
    assert updates.holds(6) and not updates.holds(5)


def test_a_recovery_brings_the_state_to_a_step(updates: Updates, board: ProgressBoard) -> None:
    updates.start(-1)
    updates.corrupted()
    assert updates.commit() is None
    updates.reached(3)
    assert updates.commit() == board.commit == CommitState(step=3)


def test_while_training_is_stopped_no_update_begins(updates: Updates) -> None:
    updates.forbid("a test wants it")
    with pytest.raises(ForceStopError, match="FORCE STOP: a test wants it"):
        updates.start(-1)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        updates.copy()
    assert updates.commit() == CommitState(step=0)
    updates.allow()
    updates.start(-1)


def test_an_update_that_was_begun_is_ended_all_the_same(updates: Updates) -> None:
    updates.start(-1)
    updates.forbid("a test wants it")
    assert not updates.wait_until_ended(0.0)
    updates.end(1)
    assert updates.wait_until_ended(0.0)
    assert updates.commit() == CommitState(step=1)


def test_an_end_without_a_begin_changes_nothing(updates: Updates) -> None:
    updates.end(3)
    assert updates.step == 0


@pytest.mark.parametrize("step", [0, -1, 2**63 - 1, 1.0, "1", None, True])
def test_another_number_is_no_step(updates: Updates, step: Any) -> None:
    with pytest.raises(ConfigError, match="tft_end_updating_os: step is"):
        updates.end(step)


@pytest.mark.parametrize("step", [-2, 2**63 - 1, 0.5, None, False])
def test_another_number_is_no_backup_step(updates: Updates, step: Any) -> None:
    with pytest.raises(ConfigError, match="tft_start_updating_os: backup_step is"):
        updates.start(step)


@pytest.mark.parametrize("step", [-1, 0, 2**63 - 2])
def test_the_ends_of_the_range_are_in_it(updates: Updates, step: int) -> None:
    updates.start(step)
    updates.end(max(1, step))
