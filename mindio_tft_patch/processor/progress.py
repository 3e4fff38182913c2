"""What this rank's main thread is doing, written by the adaptor's hooks and read by the control thread.

Single attribute stores are atomic in CPython, so that the hot path takes no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median

from mindio_tft_patch.protocol.messages import CommitState, Progress
from mindio_tft_patch.protocol.phases import Activity

Listener = Callable[[str, int], None]


class ProgressBoard:
    """State of one rank between faults.

    Args:
        clock: monotonic seconds; injected by tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._activity: tuple[Activity, float] = (Activity.SETUP, clock())
        self._broken_in: Activity | None = None  # innermost doing() that an exception has left
        self._collective_since: float | None = None
        self._commit = CommitState(step=0)
        self._step_began: float | None = None
        self._durations: deque[float] = deque(maxlen=32)
        self._listeners: list[Listener] = []
        self._probe: Callable[[], bool] | None = None
        self._probed_since: float | None = None

    @property
    def commit(self) -> CommitState:
        """How far the optimizer state is."""
        return self._commit

    @property
    def activity(self) -> Activity:
        """What the main thread is doing."""
        return self._activity[0]

    def broken_in(self) -> Activity:
        """What was being done when the last exception came; asking forgets it."""
        activity, self._broken_in = self._broken_in or self.activity, None
        return activity

    def set_commit(self, commit: CommitState) -> None:
        """Record the optimizer state; a completed step also ends the measurement of its duration."""
        now = self._clock()
        if commit.step > self._commit.step:
            if self._step_began is not None:
                self._durations.append(now - self._step_began)
            self._step_began = now
        self._commit = commit

    def enter(self, activity: Activity) -> None:
        """The main thread begins something else."""
        self._activity = (activity, self._clock())

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Mark a stretch of work; the activity before it is restored also when it raises."""
        before = self._activity[0]
        self.enter(activity)
        try:
            yield
        except BaseException:
            self._broken_in = self._broken_in or activity
            raise
        finally:
            # A long evaluation, save or pause must not count as the duration of a step.
            if activity in (Activity.EVALUATE, Activity.SAVE, Activity.PAUSE):
                self._step_began = None
            self.enter(before)

    def in_collective(self) -> AbstractContextManager[None]:
        """Mark that the main thread waits for other ranks."""
        return _InCollective(self)

    def probe_with(self, probe: Callable[[], bool]) -> None:
        """Ask `probe` at every snapshot whether the main thread waits, for devices where the wait is not marked."""
        self._probe = probe

    def _waiting_since(self, now: float) -> float | None:
        if self._probe is None or self._collective_since is not None:
            return self._collective_since
        if not self._probe():
            self._probed_since = None
        elif self._probed_since is None:
            self._probed_since = now
        return self._probed_since

    def listen(self, listener: Listener) -> None:
        """Call `listener(moment, step)` at every moment; for fault injection and tests."""
        self._listeners.append(listener)

    def moment(self, name: str) -> None:
        """A point that tools may want to know of; costs nothing without listeners."""
        for listener in self._listeners:
            listener(name, self._commit.step)

    def snapshot(self) -> Progress:
        """The state as reported in a heartbeat."""
        now = self._clock()
        activity, since = self._activity
        waiting = self._waiting_since(now)
        durations = tuple(self._durations)
        return Progress(
            commit=self._commit,
            activity=activity,
            activity_seconds=now - since,
            in_collective_seconds=None if waiting is None else now - waiting,
            step_seconds=median(durations) if durations else None,
        )


class _InCollective(AbstractContextManager[None]):
    """For every wait of a step; much cheaper than a generator."""

    __slots__ = ("_board", "_outer")

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board

    def __enter__(self) -> None:
        self._outer = self._board._collective_since
        if self._outer is None:
            self._board._collective_since = self._board._clock()

    def __exit__(self, *_: object) -> None:
        self._board._collective_since = self._outer
