"""When the ranks of a node are left alone, and when they are ended: the rules, without processes or clocks.

A vigil begins with a fault that ends the attempt: a local rank died, the controller ordered a dump or an exit, the
launcher was asked to terminate, or the controller is gone.

    begin --------------- survivors dump, exit by themselves --------------> over
      |  EXIT ordered: EXIT_GRACE left      |  `patience` has passed
      |                                     v
      |                        SIGTERM -> TERM_GRACE -> SIGKILL -> KILL_GRACE -> over (stuck in the kernel)
      +- hurry: SIGKILL at once

A vigil is broken off when the controller repairs the job in place: every local rank that was missing has a new process.

A rank that a command names as faulty is killed ahead of the others, after FAULTY_GRACE: a rank whose exception made
it unusable needs a moment to print its traceback, a hung one does not notice.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from enum import Enum

from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import Phase, Strategy

EXIT_GRACE_SECONDS = 10.0  # from EXIT to SIGTERM: the process's own tear-down
TERM_GRACE_SECONDS = 3.0  # from SIGTERM to SIGKILL
KILL_GRACE_SECONDS = 10.0  # after SIGKILL only a process in uninterruptible sleep is left; do not wait forever
FAULTY_GRACE_SECONDS = 1.0  # from a command that calls a rank faulty to its SIGKILL
VERDICT_SECONDS = 3.0  # every rank of the job has ended: wait this long for the controller's reason

ENDING = frozenset({Strategy.DUMP, Strategy.EXIT})


class Move(str, Enum):
    """What to do now."""

    WAIT = "wait"
    TERMINATE = "terminate"  # SIGTERM to `ranks`
    KILL = "kill"  # SIGKILL to `ranks`
    OVER = "over"


@dataclass(frozen=True)
class Step:
    """The next thing to do.

    ranks: whom a signal is for.
    until: for WAIT, when to ask again at the latest (monotonic seconds).
    """

    move: Move
    ranks: frozenset[int] = frozenset()
    until: float = 0.0


class Vigil:
    """One attempt's end on one node.

    Args:
        now: monotonic seconds of the fault.
        patience_seconds: time for the dump (TTP_OT).
        alone: this node runs every rank of the job, so nobody else can still be dumping.

    Attributes:
        verdict: the controller's EXIT; None before it.
        ended: ranks that were told to end by a signal.
    """

    def __init__(self, now: float, patience_seconds: float, *, alone: bool) -> None:
        self.began = now
        self.verdict: Do | None = None
        self.controller_lost = ""
        self.out_of_time = False
        self.ended: set[int] = set()
        self._deadline = now + patience_seconds
        self._alone = alone
        self._in_place = False
        self._ending = False
        self._doomed: dict[int, float] = {}
        self._killed_doomed: set[int] = set()
        self._emptied: float | None = None
        self._terminated: float | None = None
        self._killed: float | None = None

    def command(self, now: float, do: Do) -> None:
        """The controller has sent a phase."""
        self._in_place = do.plan.strategy not in ENDING
        if self._in_place:
            return
        self._ending = True
        if do.phase is Phase.EXIT:
            self.verdict = do
            self._deadline = min(self._deadline, now + EXIT_GRACE_SECONDS)
        for rank in do.plan.faulty:
            self._doomed.setdefault(rank, now + FAULTY_GRACE_SECONDS)

    def ask_to_end(self) -> None:
        """Somebody wants the job to end: no repair in place keeps it."""
        self._ending = True

    def repaired(self, missing: Set[int]) -> bool:
        """The fault has been dealt with in place, and nothing has to end.

        missing: local ranks that have died and have no new process.
        """
        given_up = self._ending or bool(self.controller_lost) or self._terminated is not None
        return self._in_place and not missing and not given_up

    def lose_controller(self, now: float, reason: str) -> None:
        """Nobody is left who could order a dump."""
        if not self.controller_lost:
            self.controller_lost = reason
            self._deadline = min(self._deadline, now)

    def hurry(self, now: float) -> None:
        """Somebody asked twice: no more patience."""
        self._deadline = now
        self._terminated = self._terminated if self._terminated is not None else now - TERM_GRACE_SECONDS

    def next_step(self, now: float, running: Set[int]) -> Step:
        """What to do now, given the local ranks that still run."""
        if not running:
            return self._all_gone(now)
        self._emptied = None
        due = frozenset(rank for rank, when in self._doomed.items() if when <= now and rank in running)
        if due - self._killed_doomed:
            self._killed_doomed |= due
            return self._signal(Move.KILL, due)
        if now < self._deadline:
            times = [when for rank, when in self._doomed.items() if rank in running and when > now]
            return Step(Move.WAIT, until=min([self._deadline, *times]))
        return self._end(now, frozenset(running))

    def _all_gone(self, now: float) -> Step:
        if self._emptied is None:
            self._emptied = now
        limit = min(self._deadline, self._emptied + VERDICT_SECONDS) if self._alone else self._deadline
        if self.verdict is not None or self.controller_lost or now >= limit:
            return Step(Move.OVER)
        return Step(Move.WAIT, until=limit)

    def _end(self, now: float, running: frozenset[int]) -> Step:
        if self._terminated is None:
            self._terminated = now
            self.out_of_time = self.verdict is None and not self.controller_lost
            return self._signal(Move.TERMINATE, running)
        if now < self._terminated + TERM_GRACE_SECONDS:
            return Step(Move.WAIT, until=self._terminated + TERM_GRACE_SECONDS)
        if self._killed is None:
            self._killed = now
            return self._signal(Move.KILL, running)
        if now < self._killed + KILL_GRACE_SECONDS:
            return Step(Move.WAIT, until=self._killed + KILL_GRACE_SECONDS)
        return Step(Move.OVER)

    def _signal(self, move: Move, ranks: frozenset[int]) -> Step:
        self.ended |= ranks
        return Step(move, ranks)
