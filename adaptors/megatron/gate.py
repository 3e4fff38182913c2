"""The commit gate around Megatron's optimizer (adaptation point 2); the gate itself is in adaptors/porting/gate.py.

Megatron calls `step_with_ready_grads` when every remaining piece of the update is local. Around it:

    1. wait at the gate for step S+1 (a barrier of all ranks)
    2. mark "updating S+1"
    3. the local update of every optimizer of the chain; parameter all-gathers are put aside
    4. mark "at S+1", with a record of everything else that belongs to the step
    5. the parameter all-gathers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindio_tft_patch.adaptors.megatron.train_state import leaf_optimizers
from mindio_tft_patch.adaptors.porting.gate import Call, StepGate
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.phases import Activity


class CommitGate(StepGate):
    """Wraps the optimizer of one rank.

    Args:
        board: where the marks are made.
        barrier: returns when all ranks have called it.
        next_step: number of the step that the current iteration makes.
        record: called as record(step, skipped) at mark 4.
        exchange: called once in every step, as early as its losses are known; may begin to communicate. What it returns
            is called at the gate, before the barrier.

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
        exchange: Callable[[], Callable[[], None]] = lambda: lambda: None,
    ) -> None:
        # step_with_ready_grads returns whether the update was made; the stand-in of a skipped one returns False.
        super().__init__(
            board,
            barrier=barrier,
            record=lambda step, made: record(step, not made),
            before_barrier=self._end_exchange,
        )
        self._next_step = next_step
        self._exchange = exchange
        self._exchanging: Callable[[], None] | None = None  # was begun in this optimizer.step()
        self.answer: tuple[Any, ...] | None = None
        self.result: tuple[Any, ...] = ()
        self._outermost: Any = None  # the optimizer whose step() is under way
        self._in_step = False  # inside the outermost optimizer.step()
        self._passed = False  # the gate was passed in this optimizer.step()
        self._updating = False  # inside the local update
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
            self._exchanging = self._exchange()  # travels while gradients are unscaled, measured and clipped
            result = wrapped(*args, **kwargs)
            if not self._passed:
                self._pass(lambda: False)
            return result
        finally:
            self._in_step = False
            self._exchanging = None

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

    def finish(self, target: int) -> None:
        """Finish the local update of `target` if this rank waits at its gate; gathers would need the lost ranks.

        Raises:
            RecoveryError: this rank cannot come to `target`.
        """
        super().finish(target)
        self._put_aside.clear()

    def abandon(self) -> None:
        """The step at the gate will be computed again (or never); forget it."""
        self._put_aside.clear()
        self._in_step = self._updating = False
        self._exchanging = None  # it keeps connections of a process group open
        super().abandon()

    def _end_exchange(self) -> None:
        end, self._exchanging = self._exchanging or self._exchange(), None
        end()

    def _pass(self, update: Call) -> Any:
        self._passed = True

        def marked() -> Any:
            self._updating = True
            try:
                return update()
            finally:
                self._updating = False

        return self.commit(self._next_step(), marked)


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
