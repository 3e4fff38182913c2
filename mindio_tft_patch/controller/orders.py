"""What the cluster manager orders: may it be obeyed now, and who carries it out. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

from mindio_tft_patch.controller.deal import Deal, Stage
from mindio_tft_patch.controller.events import (
    Answer,
    Attached,
    Choose,
    FaultyRanks,
    Instruction,
    Order,
    PauseTraining,
    ReportStopped,
    SaveAndExit,
    Send,
    StopTraining,
    Tell,
    Unheard,
    processor,
)
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.pause import Pause
from mindio_tft_patch.controller.pause import Stage as PauseStage
from mindio_tft_patch.controller.recovery import Recovery
from mindio_tft_patch.controller.roster import Fault, Roster, named, note
from mindio_tft_patch.controller.vocabulary import CONTINUE, STRATEGIES, Code, kind_of
from mindio_tft_patch.controller.walker import Walker
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

SAVE_AND_EXIT = "the cluster manager asked for a checkpoint and the end"


class Orders:
    """Obeys the cluster manager, or says why not.

    Args:
        options: durations.
        roster: what is known of every rank.
        walker: carries recoveries out.

    Attributes:
        pause: the pause that is going on.
    """

    def __init__(self, options: Options, roster: Roster, walker: Walker) -> None:
        self._options = options
        self._roster = roster
        self._walker = walker
        self.pause: Pause | None = None

    def obey(self, order: Order, now: float) -> Answer:
        """Take in an order. SaveAndExit is a fault of the whole job, which the machine takes in afterwards."""
        reason = self._obey(order, now)
        self.forget_pause()
        return Answer(not reason, reason)

    def release(self, rank: int) -> None:
        """A rank says that it holds: if nobody wants that any more, it has missed the word to go on."""
        walker = self._walker
        if self.pause is None and walker.recovery is None and walker.verdict is None:
            attempt = max(walker.attempt, self._roster.attempt)
            go_on = Do(attempt, Phase.RESUME, Plan(Strategy.RETRY, "no pause is going on"))
            walker.out.append(Send(processor(rank), go_on))

    def forget_pause(self) -> None:
        """A pause that is over is history."""
        if self.pause is not None and self.pause.stage is PauseStage.OVER:
            self.pause = None

    def _obey(self, order: Order, now: float) -> str:
        if isinstance(order, Attached):
            self._walker.negotiator.attached = True
            return ""
        if self._walker.verdict is not None:
            return f"the job is ending: {self._walker.verdict.reason}"
        if isinstance(order, Unheard):
            return self._unheard(order, now)
        if isinstance(order, SaveAndExit):
            return ""
        if not self._walker.negotiator.attached:
            return "no cluster manager is attached: not all of its four callbacks are registered"
        return self._negotiate(order, now)

    def _negotiate(self, order: Union[StopTraining, PauseTraining, FaultyRanks, Choose], now: float) -> str:
        if isinstance(order, PauseTraining):
            return self._pause(order, now)
        if isinstance(order, Choose):
            return self._choose(order.word, now)
        strange = self._unknown(order.ranks)
        if strange:
            return strange
        return self._stop(order, now) if isinstance(order, StopTraining) else self._faulty(order, now)

    @property
    def _deal(self) -> Deal | None:
        recovery = self._walker.recovery
        return recovery.deal if recovery else None

    def _unheard(self, order: Unheard, now: float) -> str:
        if self._deal is not None and not self._deal.chosen:
            self._walker.alone(now, order.detail)
        return ""

    def _unknown(self, ranks: Mapping[int, int]) -> str:
        strays = [rank for rank in ranks if rank not in self._roster.ranks]
        if strays:
            return f"{named(strays)} is not from 0 to {self._options.world_size - 1}"
        try:
            for number in ranks.values():
                kind_of(number)
        except ValueError as error:
            return str(error)
        return ""

    def _stop(self, order: StopTraining, now: float) -> str:
        recovery, deal = self._walker.recovery, self._deal
        if recovery is not None and deal is None:
            return "the controller recovers by itself already"
        if deal is not None and deal.chosen:
            return f"{deal.choice} is being carried out"
        if self.pause is not None:
            self.pause.ends("the cluster manager has ordered training to stop")
        if recovery is None and not order.ranks:
            # Something has to be the reason; a broken connection asks for no more than to compute the step again.
            self._roster.faults.append(Fault(None, FaultKind.NETWORK, "the cluster manager has ordered a stop"))
        self._declare(order.ranks, now)
        self._begin_stop(now)
        return ""

    def _begin_stop(self, now: float) -> None:
        walker = self._walker
        recovery = walker.recovery or Recovery(began=now, decide_at=None, deal=walker.negotiator.deal())
        walker.recovery, walk = recovery, recovery.walk
        if walk is None:
            recovery.decide_at = now  # no more waiting for other reports
        consulting = walk is not None and walk.consulting
        walker.alone(now, walker.negotiator.stop_ordered(recovery, now, consulting=consulting))

    def _faulty(self, order: FaultyRanks, now: float) -> str:
        recovery, deal = self._walker.recovery, self._deal
        if recovery is None or deal is None:
            return "no recovery is negotiated"
        walk = recovery.walk
        if deal.stage not in (Stage.RANKS, Stage.CHOICE) or walk is None or not walk.consulting:
            return f"it is the cluster manager's part {deal.stage.value}"
        self._declare(order.ranks, now)
        self._walker.negotiator.ranks_named(recovery, order.seconds, now)
        return ""

    def _declare(self, ranks: Mapping[int, int], now: float) -> None:
        """Take in what the manager knows of ranks. What it says of a process that is replaced already is old."""
        known = {(fault.rank, fault.kind) for fault in self._roster.faults}
        for rank in sorted(ranks):
            state = self._roster.ranks[rank]
            fault = Fault(rank, kind_of(ranks[rank]), "the cluster manager says so")
            if state.finished or state.awaited or state.returning or (rank, fault.kind) in known:
                continue
            self._roster.faults.append(fault)
            self._walker.log("warning", f"fault: {fault}", rank_of_fault=rank, kind=fault.kind.value)
            if state.lost is None:
                note(state, fault)
            recovery = self._walker.recovery
            if fault.losing and recovery is not None and recovery.walk is not None:
                self._walker.do_without(recovery, recovery.walk, rank, now)

    def _choose(self, word: str, now: float) -> str:
        if word == CONTINUE:
            if self.pause is None or not self.pause.may_continue:
                return "nothing is paused"
            self.pause.go_on(now)
            return ""
        if word not in STRATEGIES:
            return f"{word!r} is not offered; {', '.join((*STRATEGIES, CONTINUE))} are"
        recovery, deal = self._walker.recovery, self._deal
        if recovery is None or deal is None:
            return "no recovery is negotiated"
        reason = deal.may_choose(word)
        if reason:
            return reason
        changed = deal.chosen
        deal.choose(word)
        if changed:
            self._walker.restart(recovery, now, f"the cluster manager has chosen {word} instead", wait_seconds=0.0)
        elif recovery.decide_at is None:
            self._walker.begin(recovery, now)
        return ""

    def _pause(self, order: PauseTraining, now: float) -> str:
        code, reason = self._no_pause()
        if reason:
            self._walker.out.append(Tell(ReportStopped(code, reason, {})))
            return reason
        seconds = self._options.manager_seconds if order.timeout_seconds is None else order.timeout_seconds
        walker = self._walker

        def out(instruction: Instruction) -> None:
            walker.out.append(instruction)  # another list at every event

        self.pause = Pause(self._options, self._roster, seconds, next_attempt=walker.count_attempt, out=out)
        self.pause.begin(now)
        return ""

    def _no_pause(self) -> tuple[Code, str]:
        if self._walker.recovery is not None:
            return Code.WRONG_ORDER, "a recovery is going on"
        if self.pause is not None:
            return Code.WRONG_ORDER, f"a pause is going on: {self.pause.stage.value}"
        unready = [rank for rank, state in self._roster.ranks.items() if not state.back]
        gone = [rank for rank in unready if self._roster.ranks[rank].finished]
        if gone:
            return Code.ERROR, f"{named(gone)} has left training"
        return (Code.NOT_READY, f"{named(unready)} did not finish the set-up") if unready else (Code.GOOD, "")
