"""The commit gate (adaptation point 2): why no completed step is ever lost or half done.

Around the part of a step that needs no other rank, `update`:

    1. wait at the gate for step S+1 (a barrier of all ranks)
    2. mark "updating S+1"
    3. update()
    4. mark "at S+1", with a record of everything else that belongs to the step

A rank that passed 1 knows that the gradients of every rank are ready. So, after a fault: if any healthy rank passed,
all finish S+1 (`finish`), also those whose barrier raised; else all are still at S. An iteration whose update is
skipped (overflow) passes the same gate, with nothing to do in 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Plan
from mindio_tft_patch.protocol.phases import Activity, Strategy

Call = Callable[[], Any]


class StepGate:
    """The gate of one rank.

    Args:
        board: where the marks are made.
        barrier: returns when all ranks have called it.
        record: called as record(step, result of the update) at mark 4; local, like the update.
        before_barrier: called before the barrier of every step; may communicate.
    """

    def __init__(
        self,
        board: ProgressBoard,
        *,
        barrier: Callable[[], None],
        record: Callable[[int, Any], None] = lambda step, result: None,
        before_barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._barrier = barrier
        self._record = record
        self._before_barrier = before_barrier
        self._pending: Call | None = None  # local update of the step that waits at the gate

    @property
    def completed(self) -> int:
        """Last step whose local update is complete on this rank."""
        return self._board.commit.step

    def commit(self, step: int, update: Call) -> Any:
        """Make a step: wait until every rank is ready for it, then update.

        Args:
            step: the one that `update` completes.
            update: everything of it that is this rank's own; no communication. May be called by `finish` instead, in
                the clean phase. What it returns is handed to `record`.

        Returns:
            What `update` has returned.
        """
        self._pending = update
        self._board.set_commit(CommitState(step=self._board.commit.step, at_gate=step))
        self._board.moment("before_gate")
        with self._board.doing(Activity.GATE):
            self._before_barrier()
            self._barrier()
        return self._update(step, update)

    def settle(self, plan: Plan, rank: int) -> None:
        """Clean phase: bring this rank to `plan.target_step` without any other rank.

        A rank whose state will come from a replica, or from a checkpoint, only forgets the step that it was in.

        Raises:
            RecoveryError: the target step cannot be reached here.
        """
        # Past the target are only ranks that will put back what they have kept of it: later steps are corrupt.
        past = plan.strategy is Strategy.DUMP and self.completed > plan.target_step
        if plan.strategy is not Strategy.RELOAD and rank not in plan.faulty and not past:
            self.finish(plan.target_step)
        self.abandon()

    def finish(self, target: int) -> None:
        """Finish the local update of `target` if this rank waits at its gate.

        Raises:
            RecoveryError: this rank cannot come to `target`.
        """
        commit = self._board.commit
        if commit.step == target:
            self._pending = None
            return
        if commit.at_gate != target or self._pending is None:
            raise RecoveryError("clean", f"asked to finish step {target}, but this rank is at {commit}")
        update, self._pending = self._pending, None
        self._update(target, update)

    def abandon(self) -> None:
        """The step at the gate will be computed again (or never); forget it."""
        self._pending = None
        self._board.set_commit(CommitState(step=self._board.commit.step))

    def _update(self, step: int, update: Call) -> Any:
        self._board.set_commit(CommitState(step=self._board.commit.step, updating=step))
        self._pending = None
        self._board.moment("after_gate")
        with self._board.doing(Activity.UPDATE):
            result = update()
        self._record(step, result)
        self._board.set_commit(CommitState(step=step))
        self._board.moment("committed")
        return result
