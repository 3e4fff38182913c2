"""The state of one recovery, and its record: one JSON object, the last line of the log of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindio_tft_patch.controller.decide import by_cause
from mindio_tft_patch.controller.roster import Roster
from mindio_tft_patch.protocol.messages import Failed, Plan
from mindio_tft_patch.protocol.phases import PATHS, Phase, Strategy


@dataclass
class Walk:
    """One attempt: a walk along PATHS[plan.strategy].

    Attributes:
        index: place on the path.
        waiting: ranks whose answer to the current phase has not come.
        began: when the current phase began.
        deadline: when it must be over.
        failures: answers Failed, in the order in which they came.
        lost: a rank was lost in this attempt; then the failures of others are its doing.
    """

    plan: Plan
    index: int = 0
    waiting: set[int] = field(default_factory=set)
    began: float = 0.0
    deadline: float = 0.0
    failures: list[Failed] = field(default_factory=list)
    lost: bool = False

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return PATHS[self.plan.strategy][self.index]

    @property
    def following(self) -> Phase | None:
        """The phase after the current one; None at the end of the path."""
        path = PATHS[self.plan.strategy]
        return path[self.index + 1] if self.index + 1 < len(path) else None


@dataclass
class Recovery:
    """Everything between a fault and its end, over all attempts.

    Attributes:
        began: when the first report came.
        decide_at: when the next attempt begins; None while one walks on.
        excluded: strategies that failed or are used up, with the reason.
        dump_deadline: when the launcher ends the survivors; None before the first attempt at DUMP or EXIT.
        failed_dumps: attempts at DUMP in which a rank failed.
        seconds: time in each phase, over all attempts.
        checkpoint: path that the dump has reported.
    """

    began: float
    decide_at: float | None
    walk: Walk | None = None
    excluded: dict[Strategy, str] = field(default_factory=dict)
    dump_deadline: float | None = None
    failed_dumps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    checkpoint: str = ""

    def count(self, phase: Phase, seconds: float) -> None:
        """Add to the time spent in a phase."""
        self.seconds[phase.value] = self.seconds.get(phase.value, 0.0) + seconds


def record_of(recovery: Recovery, roster: Roster, plan: Plan, attempt: int, now: float) -> dict[str, object]:
    """The recovery record. `step` is the step that was kept; 0 when none was.

    `recomputed_steps` counts steps that some rank had completed and that are computed again.
    """
    kept = plan.target_step if plan.strategy is not Strategy.EXIT else 0
    completed = [state.commit.step for state in roster.ranks.values() if state.commit is not None]
    return {
        "record": "recovery",
        "fault": [{"rank": f.rank, "kind": f.kind.value, "detail": f.detail} for f in by_cause(roster.faults)],
        "ranks": list(plan.faulty),
        "participants": list(plan.participants),
        "step": kept,
        "recomputed_steps": max(0, max(completed, default=0) - kept) if kept else 0,
        "seconds": {name: round(seconds, 3) for name, seconds in recovery.seconds.items()},
        "seconds_in_all": round(now - recovery.began, 3),
        "bytes_moved": recovery.bytes_moved,
        "strategy": plan.strategy.value,
        "attempts": attempt,
        "checkpoint": recovery.checkpoint,
        "reason": plan.reason,
    }
