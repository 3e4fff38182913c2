"""Where the training thread and the control thread meet.

    training thread   enter -> (training) -> arrive(report) -> wait for a verdict -> enter again, or leave
    control thread    wait for a report or a command -> recover -> release(verdict)

The control thread carries out what the controller says, as in the original: the callbacks of a framework expect not to
run on the training thread, and a checkpoint can be written while that thread is stuck.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mindio_tft_patch.adaptors.sdk.enums import ReportState
from mindio_tft_patch.protocol.phases import FaultKind

_SLICE_SECONDS = 0.1


@dataclass(frozen=True)
class Report:
    """Why the training thread has left the training function.

    kind: as the controller is told; None: nothing is wrong, it was stopped.
    """

    state: ReportState
    kind: FaultKind | None
    detail: str = ""
    error: BaseException | None = None


class Verdict(Enum):
    """What the training thread does next."""

    AGAIN = "again"  # call the training function again
    LEAVE = "leave"  # the job ends
    ALONE = "alone"  # the controller is gone: as if there were none


class Mainline:
    """One training thread, as the control thread sees it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = False
        self._finished = False
        self._report: Report | None = None  # not taken yet
        self._last: Report | None = None
        self._verdict: Verdict | None = None
        self._jobs: deque[Callable[[], None]] = deque()

    @property
    def inside(self) -> bool:
        """The training function runs, as far as is known."""
        return self._inside

    @property
    def last(self) -> Report | None:
        """The latest report."""
        return self._last

    # On the training thread.

    def enter(self) -> None:
        """The training function is called."""
        with self._changed:
            self._inside = True

    def arrive(self, report: Report) -> None:
        """The training function was left."""
        with self._changed:
            self._inside, self._report, self._last = False, report, report
            if self._verdict is Verdict.AGAIN:
                self._verdict = None  # that was the end of an earlier recovery
            self._changed.notify_all()

    def finish(self) -> None:
        """Training has ended in good order."""
        with self._changed:
            self._inside, self._finished = False, True
            self._changed.notify_all()

    def wait_for_verdict(self, timeout_seconds: float | None = None) -> Verdict | None:
        """Wait for what the control thread has decided; None when the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict is not None, timeout_seconds)
            return self._verdict

    # On the control thread.

    def await_event(self, commanded: Callable[[], bool]) -> Report | None:
        """Wait, and do small jobs meanwhile, until there is something to do.

        Args:
            commanded: has the controller sent a command that nobody has taken?

        Returns:
            A report of the training thread; None when there is a command, or training has ended.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._report or self._finished or self._jobs or commanded())
                job = self._jobs.popleft() if self._jobs else None
                if job is None:
                    return None if commanded() else self._take()
            job()

    @property
    def finished(self) -> bool:
        """Training has ended in good order."""
        return self._finished

    def await_arrival(self, timeout_seconds: float, interrupted: Callable[[], bool]) -> bool:
        """Wait until the training thread has left the training function; False when it has not in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._inside and not interrupted():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, _SLICE_SECONDS))
            return not self._inside

    def take_report(self) -> Report | None:
        """A report that was not taken yet."""
        with self._changed:
            return self._take()

    def release(self, verdict: Verdict) -> None:
        """Tell the training thread what to do next."""
        with self._changed:
            self._verdict = verdict
            self._report = None  # this is the answer to it
            # From now on, and not when that thread has woken up: a command that comes meanwhile must find it inside.
            self._inside = verdict is Verdict.AGAIN
            self._changed.notify_all()

    # From any thread.

    def nudge(self) -> None:
        """Have `await_event` look again."""
        with self._changed:
            self._changed.notify_all()

    def submit(self, job: Callable[[], None]) -> None:
        """Have the control thread do a small job while it waits."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def _take(self) -> Report | None:
        report, self._report = self._report, None
        return report
