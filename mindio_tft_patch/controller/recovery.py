"""The state of one recovery, and its record: one JSON object, the last line of the log of a recovery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mindio_tft_patch.controller.deal import Deal
from mindio_tft_patch.controller.decide import by_cause
from mindio_tft_patch.controller.roster import Fault, RankState, Roster
from mindio_tft_patch.protocol.messages import Done, Failed, Plan
from mindio_tft_patch.protocol.phases import PATHS, FaultKind, Phase, Strategy

RETURN = "return"  # in `seconds` of the record: held before REBUILD for processes on their way back
MANAGER = "manager"  # held after STOP for the cluster manager's word


@dataclass
class Walk:
    """One attempt: a walk along PATHS[plan.strategy].

    Attributes:
        index: place on the path.
        waiting: ranks whose answer to the current phase has not come.
        began: when the current phase, or the hold after it, began.
        deadline: when it must be over.
        holding: the phase is over, but ranks that the next one needs are still on their way back.
        failures: answers Failed, in the order in which they came.
        lost: a rank was lost in this attempt; then the failures of others are its doing.
        asking: it ends with STOP: what follows is the cluster manager's choice, and another attempt.
        consulting: such an attempt has come to its end, and the manager's word is waited for.
    """

    plan: Plan
    index: int = 0
    waiting: set[int] = field(default_factory=set)
    began: float = 0.0
    deadline: float = 0.0
    holding: bool = False
    failures: list[Failed] = field(default_factory=list)
    lost: bool = False
    asking: bool = False
    consulting: bool = False

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
        attempts: how many there were.
        ordered: how often a rank was ordered to be started anew.
        completed: last step that any rank has completed.
        seconds: time in each phase, over all attempts.
        checkpoint: path that the dump has reported.
        deal: what has been settled with the cluster manager; None: the controller decides by itself.
    """

    began: float
    decide_at: float | None
    walk: Walk | None = None
    excluded: dict[Strategy, str] = field(default_factory=dict)
    dump_deadline: float | None = None
    failed_dumps: int = 0
    attempts: int = 0
    ordered: Counter[int] = field(default_factory=Counter)
    completed: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    checkpoint: str = ""
    deal: Deal | None = None

    def count(self, walk: Walk, now: float) -> None:
        """Add the time since the current phase, or the hold after it, began."""
        name = RETURN if walk.holding else MANAGER if walk.consulting else walk.phase.value
        self.seconds[name] = self.seconds.get(name, 0.0) + now - walk.began

    def begin(self, plan: Plan, roster: Roster, *, asking: bool = False) -> None:
        """A new attempt: answers to older ones are void, and ranks to be started anew are on their way from now on."""
        self.decide_at = None
        self.checkpoint = ""
        self.attempts += 1
        self.walk = Walk(plan, asking=asking)
        if not plan.participants:  # nobody is left who could say it
            self.completed = max(self.completed, roster.completed())
        for state in roster.ranks.values():
            state.commit = None
        for rank in plan.lost:
            state = roster.ranks[rank]
            if state.lost is None:
                state.lost = Fault(rank, FaultKind.PROCESS_DEATH, "ended in order to be started anew")
            state.awaited, state.returning = True, False
            self.ordered[rank] += 1

    def note_commit(self, state: RankState, answer: Done) -> None:
        """How far a rank is. What a process that has come back says to STOP means nothing: it holds no state yet."""
        if answer.commit is None or (answer.phase is Phase.STOP and state.returning):
            return
        state.commit = answer.commit
        if answer.phase in (Phase.STOP, Phase.CLEAN):
            self.completed = max(self.completed, answer.commit.step)


def record_of(recovery: Recovery, roster: Roster, plan: Plan, budget_left: int, now: float) -> dict[str, object]:
    """The recovery record. `step` is the step that was kept; 0 when none was.

    `recomputed_steps` counts steps that some rank had completed and that are computed again.
    """
    kept = plan.target_step if plan.strategy is not Strategy.EXIT else 0
    lasting = bool(kept) or plan.strategy is Strategy.RELOAD
    restarted = {state.rank for state in roster.ranks.values() if state.returning} | set(recovery.ordered)
    return {
        "record": "recovery",
        "fault": [{"rank": f.rank, "kind": f.kind.value, "detail": f.detail} for f in by_cause(roster.faults)],
        "ranks": list(plan.faulty),
        "participants": list(plan.participants),
        "restarted": sorted(restarted),
        "step": kept,
        "recomputed_steps": max(0, recovery.completed - kept) if lasting else 0,
        "seconds": {name: round(seconds, 3) for name, seconds in recovery.seconds.items()},
        "seconds_in_all": round(now - recovery.began, 3),
        "bytes_moved": recovery.bytes_moved,
        "strategy": plan.strategy.value,
        "attempts": recovery.attempts,
        "budget_left": budget_left,
        "checkpoint": recovery.checkpoint,
        "reason": plan.reason,
    }


def words_of(record: Mapping[str, Any]) -> str:
    """A recovery record for people, in one line: what is told elsewhere in the log (fault, reason) is left out."""
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in record["seconds"].items())
    words = f"recovery over: {record['strategy']} in {record['seconds_in_all']:.3f} s ({phases}); "
    words += f"step {record['step']} kept" if record["step"] else "no step kept"
    words += f", {record['recomputed_steps']} completed step(s) to be computed again"
    return words + (f"; checkpoint {record['checkpoint']}" if record["checkpoint"] else "")
