"""All ranks hold between two steps, for a while, because the cluster manager says so. Nothing is wrong. No I/O.

    FREEZE --every rank has said which step it has begun last--> GATHER (at the highest of them)
        --every rank holds--> HELD, the manager is told
        --it says continue, or nothing in time--> RELEASE --all go on--> over

Whatever goes wrong before HELD lets everybody go on, and the manager is told that there is no pause. A fault, or an
order to stop, ends a pause at any time: STOP lets ranks leave their hold.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Union

from mindio_tft_patch.controller.events import (
    Instruction,
    Log,
    Report,
    ReportResult,
    ReportStopped,
    Send,
    Tell,
    processor,
)
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.roster import Fault, RankState, Roster, named
from mindio_tft_patch.controller.vocabulary import CONTINUE, Code
from mindio_tft_patch.protocol.messages import Do, Done, Failed, Plan
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy


class Stage(Enum):
    """How far a pause has come."""

    FREEZE = "asking which step each rank has begun last"
    GATHER = "waiting for every rank to hold"
    HELD = "all ranks hold"
    RELEASE = "letting all ranks go on"
    OVER = "over"


class Pause:
    """One pause.

    Args:
        seconds: how long the ranks hold when the manager says nothing.
        next_attempt: a new number, so that answers to older commands can be told from those to newer ones.
        out: hands out an instruction.

    Attributes:
        stage: how far it has come.
    """

    def __init__(
        self,
        options: Options,
        roster: Roster,
        seconds: float,
        *,
        next_attempt: Callable[[], int],
        out: Callable[[Instruction], None],
    ) -> None:
        self._options = options
        self._roster = roster
        self._seconds = seconds
        self._next_attempt = next_attempt
        self._out = out
        self._do = Do(0, Phase.PAUSE, Plan(Strategy.RETRY, ""))
        self._waiting: set[int] = set()
        self._begun: dict[int, int] = {}
        self._deadline = 0.0
        self._released = ""
        self.stage = Stage.FREEZE

    def begin(self, now: float) -> None:
        """Ask all ranks to begin no further step."""
        self._command(Stage.FREEZE, Phase.PAUSE, 0, now, self._next_attempt())

    @property
    def may_continue(self) -> bool:
        """All ranks hold, and nobody has let them go on."""
        return self.stage is Stage.HELD

    def go_on(self, now: float) -> None:
        """The manager says continue."""
        self._release(now, "training goes on")

    def answer(self, state: RankState, answer: Union[Done, Failed], now: float) -> bool:
        """A rank has answered; False when that was no answer to a command of this pause."""
        if (answer.attempt, answer.phase) != (self._do.attempt, self._do.phase):
            return False
        if state.rank not in self._waiting:
            return True
        if isinstance(answer, Failed):
            self.fails(f"rank {state.rank} cannot hold: {answer.reason}", now)
            return True
        self._waiting.discard(state.rank)
        if answer.commit is not None:
            self._begun[state.rank] = answer.commit.step
        if not self._waiting:
            self._all_answered(now)
        return True

    def _all_answered(self, now: float) -> None:
        if self.stage is Stage.FREEZE:
            self._command(Stage.GATHER, Phase.PAUSE, max(self._begun.values()), now, self._next_attempt())
        elif self.stage is Stage.GATHER:
            step = self._do.plan.target_step
            self.stage, self._deadline = Stage.HELD, now + self._seconds
            self._log("info", f"all ranks hold after step {step}, {self._seconds:.0f} s at most")
            self._tell(ReportStopped(Code.GOOD, f"all ranks hold after step {step}", {}))
        elif self.stage is Stage.RELEASE:
            self.stage = Stage.OVER
            self._log("info", f"the pause is over: {self._released}")
            self._tell(ReportResult(Code.GOOD, self._released, {}, CONTINUE))

    def tick(self, now: float) -> list[Fault]:
        """Time has passed.

        Returns:
            Ranks that give no sign of life; the machine hands them to `fault`.
        """
        if self.stage is Stage.HELD and now >= self._deadline:
            self._release(now, "training goes on by itself: the cluster manager has not said so in time")
        elif self.stage in (Stage.FREEZE, Stage.GATHER) and now >= self._deadline:
            self.fails(f"{named(self._waiting)} did not hold within {self._options.phase_timeout_seconds:.0f} s", now)
        elif self.stage is Stage.RELEASE and now >= self._deadline:
            self.stage = Stage.OVER
            self._tell(ReportResult(Code.EXIT_LEFT, f"{named(self._waiting)} does not go on", {}, CONTINUE))
        limit = 2 * self._options.silence_seconds
        silent = [state for state in self._roster.present() if state.silent_for(now) >= limit]
        return [
            Fault(state.rank, FaultKind.HEARTBEAT_LOST, f"no sign of life for {state.silent_for(now):.1f} s in a pause")
            for state in silent
            if not self._roster.watched(state.rank, now)
        ]

    def fails(self, reason: str, now: float) -> None:
        """The ranks cannot all hold, and so none does."""
        if self.stage in (Stage.HELD, Stage.RELEASE):
            self.ends(reason)
            return
        self._tell(ReportStopped(Code.ERROR, reason, {}))
        self._log("warning", f"no pause: {reason}")
        self._command(Stage.OVER, Phase.RESUME, 0, now, self._do.attempt)

    def ends(self, reason: str) -> None:
        """A fault or an order to stop has ended the pause: what follows releases the ranks."""
        self._log("warning", f"the pause is over: {reason}")
        if self.stage in (Stage.FREEZE, Stage.GATHER):
            self._tell(ReportStopped(Code.ERROR, reason, {}))
        elif self.stage is Stage.RELEASE:
            self._tell(ReportResult(Code.DUMP_LEFT, reason, {}, CONTINUE))
        self.stage = Stage.OVER

    def missed_command(self, rank: int) -> None:
        """A rank has reconnected: tell it again what is waited for."""
        if rank in self._waiting:
            self._out(Send(processor(rank), self._do))

    def _release(self, now: float, how: str) -> None:
        self._released = how
        self._command(Stage.RELEASE, Phase.RESUME, self._do.plan.target_step, now, self._do.attempt)

    def _command(self, stage: Stage, phase: Phase, step: int, now: float, attempt: int) -> None:
        ranks = [state.rank for state in self._roster.present()]
        plan = Plan(
            Strategy.RETRY,  # of all strategies the one that asks for the least; nothing is recovered
            "the cluster manager has ordered a pause",
            target_step=step,
            participants=tuple(ranks),
        )
        self.stage, self._do = stage, Do(attempt, phase, plan)
        self._waiting, self._deadline = set(ranks), now + self._options.phase_timeout_seconds
        for rank in ranks:
            self._out(Send(processor(rank), self._do))
        self._log("info", f"pause: {stage.value}")

    def _tell(self, report: Report) -> None:
        self._out(Tell(report))

    def _log(self, level: str, text: str) -> None:
        self._out(Log(level, text, {"attempt": self._do.attempt, "phase": Phase.PAUSE.value}))
