"""Where the main thread holds between two steps: the control thread takes the orders, the main thread obeys (point 12).

All ranks must hold at the same step, and nobody knows in advance which of them is ahead: so there are two orders.

    PAUSE without target   begin no further step for now; answered at once, with the step that was begun last
    PAUSE with a target    (the highest of the answers) go on until this step is complete, then hold; answered then
    RESUME                 go on

STOP makes a main thread that holds leave for the guard. `processor.guard.Guard.boundary` is the main thread's side.
"""

from __future__ import annotations

import threading

from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.protocol.messages import CommitState, Do
from mindio_tft_patch.protocol.phases import Phase


class PausePoint:
    """The orders to one rank."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = 0
        self._order: Do | None = None
        self._held = False  # the main thread waits for another order
        self._leave = False

    # On the control thread.

    def concerns(self, do: Do) -> bool:
        """Is this for a rank that trains or holds? RESUME may also be for one that recovers, which has had a STOP."""
        return do.phase is Phase.PAUSE or (do.phase is Phase.RESUME and self._order is not None)

    def order(self, do: Do, completed: int) -> CommitState | None:
        """Take in PAUSE or RESUME.

        Args:
            completed: last step that this rank has completed.

        Returns:
            What is to be answered at once; None: the main thread answers when it holds.
        """
        with self._changed:
            self._order = do if do.phase is Phase.PAUSE else None
            self._changed.notify_all()
            begun = max(completed, self._begun)
        if do.phase is Phase.RESUME:
            return CommitState(step=completed)
        return None if do.plan.target_step else CommitState(step=begun)

    def stop(self) -> None:
        """STOP has come: whatever was ordered is void, and a main thread that holds leaves for the guard."""
        with self._changed:
            self._order, self._leave, self._begun = None, self._held, 0  # who reloads goes back to an older step
            self._changed.notify_all()

    # On the main thread.

    def forbidding(self, step: int) -> Do | None:
        """Between two steps, `step` being complete: the order that forbids to begin the next; None: it is begun.

        Raises:
            Interrupted: STOP has come while this thread held.
        """
        with self._changed:
            self._leave_if_stopped()
            order = self._order
            self._held = order is not None and order.plan.target_step <= step
            if self._held:
                return order
            self._begun = step + 1
            return None

    def wait(self, order: Do, timeout_seconds: float) -> None:
        """Wait until another order is in force, or the time is over.

        Raises:
            Interrupted: STOP has come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._order is not order, timeout_seconds)
            self._leave_if_stopped()

    def give_up(self) -> None:
        """The controller is gone: go on without it."""
        with self._changed:
            self._order = None

    def _leave_if_stopped(self) -> None:
        if self._leave:
            self._leave = self._held = False
            raise Interrupted
