"""The commit gate (adaptation point 2): why no completed step is ever lost or half done.

Megatron calls `step_with_ready_grads` when every remaining piece of the update is local. Around it:

    1. wait at the gate for step S+1 (a barrier of all ranks)
    2. mark "updating S+1"
    3. the local update of every optimizer of the chain; parameter all-gathers are put aside
    4. mark "at S+1", with a record of everything else that belongs to the step
    5. the parameter all-gathers

A rank that passed 1 knows that the gradients of every rank are ready. So, after a fault: if any healthy rank passed,
all finish S+1 (`finish`), also those whose barrier raised; else all are still at S. An iteration whose update is
skipped (overflow) passes the same gate, with nothing to do in 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState
from mindio_tft_patch.protocol.phases import Activity

Call = Callable[[], Any]


class CommitGate:
    """Wraps the optimizer of one rank.

    Args:
        board: where the marks are made.
        barrier: returns when all ranks have called it.
        next_step: number of the step that the current iteration makes.
        record: called as record(step, skipped) at mark 4.
        before_barrier: called before the barrier of every step; may communicate.

    Attributes:
        answer: what optimizer.step() returns instead of doing anything, while the end of an iteration is repeated.
        result: what optimizer.step() returns for the step under way: successful, gradient norm, zeros.
    """

    def __init__(
        self,
        board: ProgressBoard,
        *,
        barrier: Callable[[], None],
        next_step: Callable[[], int],
        record: Callable[[int, bool], None],
        before_barrier: Callable[[], None] = lambda: None,
    ) -> None:
        self._board = board
        self._barrier = barrier
        self._next_step = next_step
        self._record = record
        self._before_barrier = before_barrier
        self.answer: tuple[Any, ...] | None = None
        self.result: tuple[Any, ...] = ()
        self._outermost: Any = None  # the optimizer whose step() is under way
        self._in_step = False  # inside the outermost optimizer.step()
        self._passed = False  # the gate was passed in this optimizer.step()
        self._updating = False  # inside the local update
        self._pending: Call | None = None  # local update of the step that waits at the gate
        self._put_aside: list[Call] = []

    def around_step(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of `optimizer.step`: makes an iteration whose update is skipped pass the gate as well."""
        if self.answer is not None:
            return self.answer
        if self._in_step:
            return wrapped(*args, **kwargs)
        self._in_step, self._passed, self._outermost = True, False, instance
        self.result = (False, None, None)
        try:
            result = wrapped(*args, **kwargs)
            if not self._passed:
                self._pass(lambda: False)
            return result
        finally:
            self._in_step = False

    def around_update(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of `step_with_ready_grads`; only the outermost optimizer of a chain is gated."""
        if self._updating:
            return wrapped(*args, **kwargs)
        self.result = (True, *self.result[1:])
        result = self._pass(lambda: _without_timer_barriers(instance, lambda: wrapped(*args, **kwargs)))
        self._board.enter(Activity.GATHER)
        self._board.moment("gather")
        gathers, self._put_aside = self._put_aside, []
        for gather in gathers:
            gather()
        self._board.enter(Activity.COMPUTE)
        return result

    def around_param_sync(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of DDP's parameter all-gathers: inside the local update they are put aside until after the mark."""
        if not self._updating:
            return wrapped(*args, **kwargs)
        self._put_aside.append(lambda: wrapped(*args, **kwargs))
        return None

    def around_norm(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of get_grad_norm and clip_grad_norm: notes what step() is going to return."""
        norm = wrapped(*args, **kwargs)
        if instance is self._outermost:
            self.result = (self.result[0], norm, self.result[2])
        return norm

    def around_zeros(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrapper of count_zeros: the same."""
        zeros = wrapped(*args, **kwargs)
        if instance is self._outermost:
            self.result = (*self.result[:2], zeros)
        return zeros

    @property
    def completed(self) -> int:
        """Last step whose local update is complete on this rank."""
        return self._board.commit.step

    def finish(self, target: int) -> None:
        """Clean phase: finish the local update of `target` if this rank waits at its gate.

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
        self._put_aside.clear()

    def abandon(self) -> None:
        """Clean phase: the step at the gate will be computed again (or never); forget it."""
        self._pending = None
        self._put_aside.clear()
        self._in_step = self._updating = False
        self._board.set_commit(CommitState(step=self._board.commit.step))

    def _pass(self, update: Call) -> Any:
        step = self._next_step()
        self._passed = True
        self._pending = update
        self._board.set_commit(CommitState(step=self._board.commit.step, at_gate=step))
        self._board.moment("before_gate")
        with self._board.doing(Activity.GATE):
            self._before_barrier()
            self._barrier()
        return self._update(step, update)

    def _update(self, step: int, update: Call) -> Any:
        self._board.set_commit(CommitState(step=self._board.commit.step, updating=step))
        self._pending = None
        self._board.moment("after_gate")
        self._updating = True
        try:
            with self._board.doing(Activity.UPDATE):
                result = update()
        finally:
            self._updating = False
        # step_with_ready_grads returns whether the update was made; the stand-in of a skipped one returns False.
        self._record(step, not result)
        self._board.set_commit(CommitState(step=step))
        self._board.moment("committed")
        return result


def _without_timer_barriers(optimizer: Any, update: Call) -> Any:
    """Run `update` with timers that call no barrier, as --timing-log-level 1 makes them: it must stay local."""
    configs = [leaf.config for leaf in (optimizer, *leaf_optimizers(optimizer)) if hasattr(leaf, "config")]
    before = [config.barrier_with_L1_time for config in configs]
    for config in configs:
        config.barrier_with_L1_time = False
    try:
        return update()
    finally:
        for config, value in zip(configs, before, strict=True):
            config.barrier_with_L1_time = value
