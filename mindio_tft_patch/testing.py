"""Helpers for tests, shipped for those who write an adaptor: fakes, and a contract test of handlers.

Nothing of the product imports this module, or contract.py and rehearsal.py behind it.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field

from mindio_tft_patch.contract import lacks
from mindio_tft_patch.errors import RecoveryError
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.protocol.messages import (
    CommitState,
    Do,
    DownMessage,
    Plan,
    Register,
    ReplicaSet,
    ShardSource,
    UpMessage,
    Welcome,
)
from mindio_tft_patch.protocol.phases import Phase, Strategy
from mindio_tft_patch.rehearsal import Rehearsal, rehearse

__all__ = [
    "FakeChannel",
    "FakeClock",
    "FakeHandlers",
    "FakeStore",
    "Rehearsal",
    "check_handlers",
    "command",
    "plan_for_tests",
]


class FakeClock:
    """A clock that goes only when told to. Seconds."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class FakeStore:
    """The job's store, in memory."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""
        self.values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        """Return a value."""
        return self.values[key]


class FakeChannel:
    """A controller in memory: takes what a link sends, hands out what a test gives it.

    Args:
        welcomes: answers to the first messages Register, one each.
    """

    def __init__(self, *welcomes: Welcome) -> None:
        self.sent: list[UpMessage] = []
        self.open = True
        self.closed = False
        self.trouble = "nobody is there"
        self._inbox: queue.SimpleQueue[DownMessage | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._welcomes = list(welcomes)

    def send(self, message: UpMessage) -> bool:
        """Take a message; refuses while `open` is False."""
        if not self.open:
            return False
        with self._changed:
            self.sent.append(message)
            self._changed.notify_all()
        if isinstance(message, Register) and self._welcomes:
            self._inbox.put(self._welcomes.pop(0))
        return True

    def receive(self, timeout_seconds: float) -> list[DownMessage]:
        """What the test has given, waiting for the first."""
        try:
            message = self._inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return []
        return [] if message is None else [message]

    def give(self, message: DownMessage) -> None:
        """Deliver a message to the link."""
        self._inbox.put(message)

    def wake(self) -> None:
        """End a `receive`."""
        self._inbox.put(None)

    def close(self) -> None:
        """Close."""
        self.closed = True

    def wait_for(self, kind: type[UpMessage], timeout_seconds: float = 5.0) -> UpMessage:
        """The first message of a kind that was sent; waits for it.

        Raises:
            AssertionError: none came in time.
        """
        with self._changed:
            self._changed.wait_for(lambda: any(isinstance(m, kind) for m in self.sent), timeout_seconds)
        found = [message for message in self.sent if isinstance(message, kind)]
        assert found, f"no {kind.__name__} was sent within {timeout_seconds} s"
        return found[0]


@dataclass
class FakeHandlers:
    """Handlers that note what they were asked to do.

    Attributes:
        called: names of the phases, in order.
        failing: phases that raise RecoveryError.
        commit: what commit_state returns.
    """

    sets: tuple[ReplicaSet, ...] = (ReplicaSet("dense", (0, 1)),)
    offered: tuple[Strategy, ...] = (Strategy.DUMP,)
    commit: CommitState = field(default_factory=lambda: CommitState(step=0))
    failing: frozenset[Phase] = frozenset()
    called: list[str] = field(default_factory=list)
    checkpoint: str = "/checkpoints/iter_0000001"

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Replica sets of this rank."""
        return self.sets

    def strategies(self) -> tuple[Strategy, ...]:
        """Strategies that are offered."""
        return self.offered

    def commit_state(self) -> CommitState:
        """How far the state is."""
        return self.commit

    def stop(self) -> None:
        """Note the call."""
        self.called.append(Phase.STOP.value)

    def arrived(self) -> None:
        """Note the call."""
        self.called.append("arrived")

    def clean(self, plan: Plan) -> Outcome:
        """Note the call; complete a step that waits at the gate."""
        outcome = self._carry_out(Phase.CLEAN)
        if self.commit.at_gate == plan.target_step:
            self.commit = CommitState(step=plan.target_step)
        return outcome

    def rebuild(self, plan: Plan) -> Outcome:
        """Note the call."""
        return self._carry_out(Phase.REBUILD)

    def repair(self, plan: Plan) -> Outcome:
        """Note the call; whatever was held before, the state is at the target now."""
        outcome = self._carry_out(Phase.REPAIR)
        self.commit = CommitState(step=plan.target_step)
        return outcome

    def rollback(self, plan: Plan) -> Outcome:
        """Note the call."""
        return self._carry_out(Phase.ROLLBACK)

    def resume(self, plan: Plan) -> Outcome:
        """Note the call."""
        return self._carry_out(Phase.RESUME)

    def dump(self, plan: Plan) -> Outcome:
        """Note the call."""
        return self._carry_out(Phase.DUMP, self.checkpoint)

    def pause(self, plan: Plan) -> Outcome:
        """Note the call."""
        return self._carry_out(Phase.PAUSE)

    def _carry_out(self, phase: Phase, detail: str = "") -> Outcome:
        self.called.append(phase.value)
        if phase in self.failing:
            raise RecoveryError(phase.value, "told to fail")
        return Outcome(detail=detail)


def check_handlers(handlers: Handlers, *, rank: int, rehearsal: Rehearsal | None = None) -> None:
    """Contract test of a framework's handlers that needs no fault; docs/porting.md says what the points are.

    Args:
        handlers: those to be checked, once the trainer is ready; with a rehearsal `porting.Protection.handlers`.
        rank: this rank.
        rehearsal: carry out what is offered, together with all other ranks, with these hooks; None: only look.

    Raises:
        AssertionError: the handlers break the contract; a line for each lack, "point 10 (repair): ...".
    """
    found = lacks(handlers, rank)
    if rehearsal is not None and not found:
        found = rehearse(handlers, rank, rehearsal)
    assert not found, "the handlers break the contract:\n" + "\n".join(f"  - {sentence}" for sentence in found)


def plan_for_tests(
    strategy: Strategy = Strategy.DUMP,
    *,
    target_step: int = 1,
    ranks: tuple[int, ...] = (0,),
    faulty: tuple[int, ...] = (),
    lost: tuple[int, ...] = (),
) -> Plan:
    """A plan in which the first rank that is not faulty speaks for one replica set of all ranks."""
    source = next(rank for rank in ranks if rank not in faulty)
    return Plan(
        strategy=strategy,
        reason="test",
        target_step=target_step,
        faulty=faulty,
        lost=lost,
        participants=ranks,
        sources=(ShardSource(ReplicaSet("dense", ranks), source),),
    )


def command(phase: Phase, attempt: int = 1, plan: Plan | None = None) -> Do:
    """A command."""
    return Do(attempt=attempt, phase=phase, plan=plan or plan_for_tests())
