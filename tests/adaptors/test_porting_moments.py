"""Moments of a drill in a trainer of one's own: what announces them without the trainer's doing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mindio_tft_patch.adaptors.porting import Activity, CommitState, Plan, Protection, Rewindable, StepGate, Strategy
from mindio_tft_patch.adaptors.porting.announced import announce
from mindio_tft_patch.config import Config
from mindio_tft_patch.fault_injection import MOMENTS
from mindio_tft_patch.patching import PatchManager
from mindio_tft_patch.random_faults import EVERY_STEP

FROM_TORCH = {"forward", "backward", "in_update"}  # of the hooks in adaptors/injection, as is what wraps the barrier
LOADER = torch.utils.data.DataLoader(torch.arange(40.0).reshape(40, 1), batch_size=2)  # type: ignore[arg-type]


class Rank:
    """A trainer that does what docs/porting.md says, and announces nothing itself."""

    def __init__(self, data: Iterator[Any]) -> None:
        self.protection = Protection(Config())
        self.board = self.protection.board
        self.gate = StepGate(self.board, barrier=lambda: self.board.moment("barrier"))
        self.data = data
        self.seen: list[tuple[str, int]] = []
        self.board.listen(lambda moment, step: self.seen.append((moment, step)))

    def steps(self, last: int) -> None:
        """What protection.run calls."""
        self.board.enter(Activity.BETWEEN)
        for step in range(self.board.commit.step + 1, last + 1):
            self.protection.boundary(step - 1)
            with self.board.doing(Activity.COMPUTE):
                next(self.data)
                self.gate.commit(step, lambda: None)

    def count(self, moment: str, step: int) -> int:
        """How often a moment came."""
        return self.seen.count((MOMENTS[moment][0], step))


@pytest.fixture
def announced() -> Iterator[list[PatchManager]]:
    """Wrappers that are taken out again."""
    managers: list[PatchManager] = []
    yield managers
    for manager in managers:
        manager.revert()


@pytest.mark.parametrize(
    "data",
    [
        lambda: Rewindable(iter(range(10))),
        lambda: iter(LOADER),
        lambda: Rewindable(iter(LOADER)),
        lambda: (batch for batch in LOADER),
    ],
    ids=["rewindable", "torch", "both", "generator"],
)
def test_every_moment_that_a_drill_draws_comes_once_in_each_step(data: Any, announced: list[PatchManager]) -> None:
    rank = Rank(data())
    announced.append(announce(rank.board))
    rank.steps(3)
    for moment in set(EVERY_STEP) - FROM_TORCH:
        assert [rank.count(moment, completed) for completed in (1, 2)] == [1, 1], moment


def test_without_faults_on_purpose_nothing_is_wrapped_and_nobody_echoes() -> None:
    rank = Rank(Rewindable(iter(range(10))))
    rank.steps(1)
    assert {moment for moment, _ in rank.seen}.isdisjoint({"loader", "step_begin", "gather"})


def test_data_of_an_evaluation_and_of_a_set_up_is_not_the_steps(announced: list[PatchManager]) -> None:
    rank = Rank(Rewindable(iter(range(10))))
    announced.append(announce(rank.board))
    next(rank.data)  # set-up
    rank.board.enter(Activity.BETWEEN)
    with rank.board.doing(Activity.EVALUATE):
        next(rank.data)
    assert rank.count("loader", 0) == 0


def test_an_update_that_is_finished_in_a_recovery_is_followed_by_no_gather(announced: list[PatchManager]) -> None:
    def stopped() -> None:
        raise RuntimeError("stopped")

    rank = Rank(iter(range(10)))
    announced.append(announce(rank.board))
    gate = StepGate(rank.board, barrier=stopped)
    with pytest.raises(RuntimeError, match="stopped"):
        gate.commit(1, lambda: None)
    with rank.board.doing(Activity.RECOVERY):
        gate.settle(Plan(Strategy.RETRY, "test", target_step=1, participants=(0,)), 0)
    assert rank.board.commit == CommitState(step=1)
    assert rank.count("after_update", 1) == 1 and rank.count("gather", 1) == 0
