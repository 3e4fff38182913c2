"""The commit gate, without torch: what is marked, in which order, and what a fault leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from mindio_tft_patch.adaptors.megatron.gate import CommitGate
from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState


class Config:
    barrier_with_L1_time = True  # noqa: N815 (Megatron's name)


class Optimizer:
    """An optimizer whose update writes down what it sees."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.config = Config()


class Rank:
    def __init__(self, *, gate_raises: bool = False, exchanges: bool = False) -> None:
        self.board = ProgressBoard(clock=lambda: 0.0)
        self.events: list[Any] = []
        self.gate_raises = gate_raises
        self.gate = CommitGate(
            self.board,
            barrier=self.barrier,
            next_step=lambda: self.board.commit.step + 1,
            record=lambda step, skipped: self.events.append(("record", step, skipped)),
            exchange=self.exchange if exchanges else lambda: lambda: None,
        )
        self.optimizer = Optimizer(self)

    def exchange(self) -> Any:
        self.events.append("exchange begins")
        return lambda: self.events.append("exchange ends")

    def barrier(self) -> None:
        self.events.append(("barrier", self.board.commit))
        if self.gate_raises:
            raise Interrupted

    def update(self) -> bool:
        self.events.append(("update", self.board.commit, self.optimizer.config.barrier_with_L1_time))
        self.gate.around_param_sync(lambda: self.events.append(("gather", self.board.commit)), None, (), {})
        return True

    def step(self, overflow: bool = False) -> Any:
        def inner() -> Any:
            if overflow:
                return False, None, None
            return self.gate.around_update(self.update, self.optimizer, (), {}), 1.0, 0

        return self.gate.around_step(inner, self.optimizer, (), {})


def test_the_gate_comes_before_the_update_and_the_gather_after_the_mark() -> None:
    rank = Rank()
    assert rank.step() == (True, 1.0, 0)
    assert rank.events == [
        ("barrier", CommitState(step=0, at_gate=1)),
        ("update", CommitState(step=0, updating=1), False),
        ("record", 1, False),
        ("gather", CommitState(step=1)),
    ]
    assert rank.board.commit == CommitState(step=1)


def test_a_skipped_update_passes_the_gate_and_is_recorded_as_skipped() -> None:
    rank = Rank()
    assert rank.step(overflow=True) == (False, None, None)
    assert rank.events == [("barrier", CommitState(step=0, at_gate=1)), ("record", 1, True)]
    assert rank.board.commit == CommitState(step=1)


def test_inner_optimizers_of_a_chain_are_not_gated_again() -> None:
    rank = Rank()

    def chain() -> bool:
        return bool(rank.gate.around_update(rank.update, rank.optimizer, (), {}))

    assert rank.gate.around_update(chain, rank.optimizer, (), {})
    assert [event[0] for event in rank.events] == ["barrier", "update", "record", "gather"]


def test_a_rank_whose_barrier_raised_finishes_the_step_on_command() -> None:
    rank = Rank(gate_raises=True)
    with pytest.raises(Interrupted):
        rank.step()
    assert rank.board.commit == CommitState(step=0, at_gate=1)
    rank.gate.finish(1)
    assert rank.board.commit == CommitState(step=1)
    assert [event[0] for event in rank.events] == ["barrier", "update", "record"], "gathers need the dead rank"


def test_a_rank_whose_barrier_raised_stays_at_the_step_before_when_told_so() -> None:
    rank = Rank(gate_raises=True)
    with pytest.raises(Interrupted):
        rank.step()
    rank.gate.finish(0)
    rank.gate.abandon()
    assert rank.board.commit == CommitState(step=0)
    assert [event[0] for event in rank.events] == ["barrier"]


def test_a_skipped_update_whose_barrier_raised_can_be_finished_too() -> None:
    rank = Rank(gate_raises=True)
    with pytest.raises(Interrupted):
        rank.step(overflow=True)
    rank.gate.finish(1)
    assert rank.board.commit == CommitState(step=1)
    assert ("record", 1, True) in rank.events


def test_a_step_that_never_reached_the_gate_cannot_be_finished() -> None:
    rank = Rank()
    with pytest.raises(RecoveryError, match="asked to finish step 1"):
        rank.gate.finish(1)


def test_timers_get_their_barriers_back_also_when_the_update_raises() -> None:
    rank = Rank()

    def broken() -> bool:
        raise MemoryError("UCE ERROR")

    with pytest.raises(MemoryError):
        rank.gate.around_update(broken, rank.optimizer, (), {})
    assert rank.optimizer.config.barrier_with_L1_time
    assert rank.board.commit == CommitState(step=0, updating=1), "this rank's shard cannot be trusted"


@pytest.mark.parametrize("overflow", [False, True])
def test_what_partners_keep_of_a_step_travels_before_the_gate_and_is_there_before_the_barrier(overflow: bool) -> None:
    rank = Rank(exchanges=True)
    rank.step(overflow)
    rank.step(overflow)
    names = [event if isinstance(event, str) else event[0] for event in rank.events]
    one = ["exchange begins", "exchange ends", "barrier", *([] if overflow else ["update"]), "record"]
    assert [name for name in names if name != "gather"] == one * 2


def test_an_exchange_that_was_begun_is_let_go_after_a_fault() -> None:
    rank = Rank(exchanges=True)

    def broken() -> Any:
        raise Interrupted

    with pytest.raises(Interrupted):
        rank.gate.around_step(broken, rank.optimizer, (), {})
    assert rank.gate._exchanging is None
    rank.events.clear()
    rank.step()
    assert rank.events[:2] == ["exchange begins", "exchange ends"]


def test_the_repeated_end_of_a_step_exchanges_nothing() -> None:
    rank = Rank(exchanges=True)
    rank.gate.answer = (True, 1.0, 0)
    assert rank.step() == (True, 1.0, 0)
    assert rank.events == []
