"""Whether the controller wants the main thread to leave what it is doing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mindio_tft_patch.errors import Interrupted


class StopFlag:
    """Raised by the control thread, answered by the main thread in the guard.

    A recovery runs because of a stop, so that stop must not interrupt it; a second one must, because a second fault
    has begun a new attempt.
    """

    def __init__(self) -> None:
        self._stops = 0  # asked for
        self._acknowledged = 0  # answered in the guard
        self._recovering = False
        self._training_stopped = False

    @property
    def stopping(self) -> bool:
        """Must the main thread leave?

        In training: from stop() to clear(). Inside recovering(): when a stop is not answered yet.
        """
        return self._stops > self._acknowledged if self._recovering else self._training_stopped

    def stop(self) -> None:
        """Control thread: leave."""
        self._stops += 1
        self._training_stopped = True

    def acknowledge(self) -> None:
        """Main thread: it has left because of one stop()."""
        self._acknowledged = min(self._acknowledged + 1, self._stops)

    def clear(self) -> None:
        """Main thread: training begins again, unless a stop is not answered yet."""
        if self._stops == self._acknowledged:
            self._training_stopped = False

    @contextmanager
    def recovering(self) -> Iterator[None]:
        """What runs inside belongs to a recovery."""
        self._recovering = True
        try:
            yield
        finally:
            self._recovering = False

    def check(self) -> None:
        """Raises Interrupted when the main thread must leave."""
        if self.stopping:
            raise Interrupted("stopped by the controller")
