"""The end of a job: EXIT to everybody who can still hear it, and again to those who seem to have missed it. No I/O."""

from __future__ import annotations

import msgspec

from mindio_tft_patch.controller.events import Conclude, Instruction, Send, Verdict, agent, processor
from mindio_tft_patch.controller.roster import RankState, Roster
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import Activity, Phase, Strategy

_RESEND_SECONDS = 1.0


class Farewell:
    """Says that the job ends.

    Attributes:
        verdict: how the job ends; None while it runs.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._exit: Do | None = None
        self._sent: dict[int, float] = {}
        self.verdict: Verdict | None = None

    def conclude(
        self, attempt: int, plan: Plan, checkpoint: str, record: dict[str, object], now: float
    ) -> list[Instruction]:
        """Pass the verdict."""
        plan = msgspec.structs.replace(plan, detail=checkpoint)
        step = plan.target_step if plan.strategy is Strategy.DUMP else 0
        self.verdict = Verdict(plan.strategy, plan.reason, checkpoint, step, record)
        self._exit = Do(attempt, Phase.EXIT, plan)
        out: list[Instruction] = [Conclude(self.verdict)]
        # Also to ranks that could not be saved or did not answer: whoever can still hear it should end with the reason.
        for state in self._roster.ranks.values():
            if state.registered is not None and not state.dead and not state.finished:
                out.append(Send(processor(state.rank), self._exit))
                self._sent[state.rank] = now
        return [*out, *(Send(agent(node), self._exit) for node in self._roster.agents)]

    def repeat(self, state: RankState, now: float) -> list[Instruction]:
        """A rank that goes on beating after EXIT may have missed it."""
        heard = state.progress.activity if state.progress else Activity.SETUP
        lately = now - self._sent.get(state.rank, now) < _RESEND_SECONDS
        if self._exit is None or heard is Activity.FINISHED or lately:
            return []
        self._sent[state.rank] = now
        return [Send(processor(state.rank), self._exit)]
