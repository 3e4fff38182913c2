"""Speaks with the cluster manager about recoveries (controller.deal says in which order). No I/O.

controller.walker asks at every turn of a recovery; the answer is empty, or why the controller has to decide by itself.
"""

from __future__ import annotations

from collections.abc import Callable

from mindio_tft_patch.controller import decide, targets
from mindio_tft_patch.controller.deal import Deal, Stage
from mindio_tft_patch.controller.events import (
    Report,
    ReportFaults,
    ReportResult,
    ReportStopped,
    ReportStrategies,
)
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.recovery import Recovery
from mindio_tft_patch.controller.roster import Roster, named
from mindio_tft_patch.controller.vocabulary import DUMP, RECOVER, RETRY, STRATEGIES, Code, ranks_of, word_of
from mindio_tft_patch.protocol.messages import Plan
from mindio_tft_patch.protocol.phases import Strategy


class Negotiator:
    """The controller's side of the table.

    Args:
        options: durations.
        roster: what is known of every rank.
        tell: hands a report to the manager.

    Attributes:
        attached: there is a cluster manager. Without one nothing here does anything.
    """

    def __init__(self, options: Options, roster: Roster, tell: Callable[[Report], None]) -> None:
        self._options = options
        self._roster = roster
        self._tell = tell
        self.attached = False

    def deal(self) -> Deal | None:
        """For a new recovery; None without a manager."""
        return Deal() if self.attached else None

    def begins(self, recovery: Recovery, now: float) -> str:
        """An attempt is about to begin."""
        deal = recovery.deal
        if deal is None:
            return ""
        ranks = ranks_of(self._roster.faults)
        if not ranks and not deal.ordered:
            return "no rank can be named to the cluster manager"
        if deal.stage is Stage.STOP and not deal.ordered and deal.deadline is None:
            deal.wait(Stage.STOP, now, self._options.manager_seconds)
        self._tell_ranks(deal, ranks)
        return ""

    def _tell_ranks(self, deal: Deal, ranks: dict[int, int]) -> None:
        if any(deal.told.get(rank) != kind for rank, kind in ranks.items()):
            deal.told = ranks
            self._tell(ReportFaults(ranks))

    def stopped(self, recovery: Recovery, now: float) -> str:
        """All ranks have stopped, and how far each of them is is known."""
        deal = recovery.deal
        assert deal is not None
        targets.mark_unusable(self._roster)
        ranks = ranks_of(self._roster.faults)
        self._tell_ranks(deal, ranks)
        if deal.failed:
            self._tell_failure(recovery, deal, ranks, now)
        elif deal.stage is Stage.CHOICE:
            self._offer(recovery, deal, now, self._options.manager_seconds)
        elif deal.stage is Stage.RANKS:
            deal.wait(Stage.RANKS, now, self._options.manager_seconds)
        elif deal.ordered:
            return self._tell_stopped(deal, ranks, now)
        return ""

    def _tell_stopped(self, deal: Deal, ranks: dict[int, int], now: float) -> str:
        unready = [rank for rank, state in self._roster.ranks.items() if not state.trained]
        if unready:
            reason = f"{named(unready)} did not finish the set-up"
            self._tell(ReportStopped(Code.NOT_READY, reason, ranks))
            return reason
        self._tell(ReportStopped(Code.GOOD, "all ranks have stopped", ranks))
        deal.wait(Stage.RANKS, now, self._options.manager_seconds)
        return ""

    def stop_ordered(self, recovery: Recovery, now: float, *, consulting: bool) -> str:
        """The manager has ordered the stop; perhaps not for the first time, with more ranks.

        Args:
            consulting: all ranks have stopped already.
        """
        deal = recovery.deal
        assert deal is not None
        deal.ordered, deal.stage, deal.deadline, deal.offered, deal.failed = True, Stage.STOP, None, (), ""
        deal.told = {**deal.told, **ranks_of(self._roster.faults)}
        return self.stopped(recovery, now) if consulting else ""

    def ranks_named(self, recovery: Recovery, seconds: float, now: float) -> None:
        """The manager has named the faulty ranks: tell it what fits."""
        deal = recovery.deal
        assert deal is not None
        deal.told = {**deal.told, **ranks_of(self._roster.faults)}
        self._offer(recovery, deal, now, max(seconds, self._options.manager_seconds))

    def _offer(self, recovery: Recovery, deal: Deal, now: float, seconds: float) -> None:
        deal.offered, deal.failed = self.fitting(recovery, now), ""
        self._tell(ReportStrategies(ranks_of(self._roster.faults), deal.offered))
        deal.wait(Stage.CHOICE, now, seconds)

    def _tell_failure(self, recovery: Recovery, deal: Deal, ranks: dict[int, int], now: float) -> None:
        deal.offered = self.fitting(recovery, now)
        code = Code.DUMP_LEFT if DUMP in deal.offered else Code.EXIT_LEFT
        if deal.choice == RETRY and RECOVER in deal.offered:
            code = Code.RECOVER_LEFT
        self._tell(ReportResult(code, deal.failed, ranks, deal.choice))
        deal.failed = ""
        deal.wait(Stage.RANKS, now, self._options.manager_seconds)

    def overdue(self, recovery: Recovery, now: float, *, consulting: bool) -> str:
        """Has the manager's word not come in time? What it cannot say yet is not waited for."""
        deal = recovery.deal
        if deal is None or deal.deadline is None or now < deal.deadline:
            return ""
        if not consulting and deal.stage is not Stage.STOP:
            return ""
        return f"the cluster manager was {deal.stage.value}, and nothing came in time (MINDIO_WAIT_MINDX_TIME)"

    def fitting(self, recovery: Recovery, now: float) -> tuple[str, ...]:
        """What could be done now, in the manager's words. Called after STOP."""
        return tuple(word for word, group in STRATEGIES.items() if any(self._fits(recovery, one, now) for one in group))

    def _fits(self, recovery: Recovery, strategy: Strategy, now: float) -> bool:
        plan, _ = decide.choose_strategy(
            self._roster, self._roster.faults, now, excluded=recovery.excluded, among=(strategy,), managed=True
        )
        return plan.strategy is strategy and not targets.out_of_reach(self._roster, strategy)

    def recovered(self, plan: Plan) -> None:
        """A recovery has succeeded."""
        if self.attached:
            ranks = ranks_of(self._roster.faults)
            self._tell(ReportResult(Code.GOOD, plan.reason, ranks, word_of(plan.strategy)))

    def concluded(self, plan: Plan) -> None:
        """The job ends, as it was to: with the checkpoint, or without one."""
        self.recovered(plan)


def stop_plan(roster: Roster) -> Plan:
    """The plan of an attempt that only stops: what follows is the manager's choice."""
    participants = tuple(state.rank for state in roster.ranks.values() if state.back and not state.returning)
    what = decide.summary(decide.root_causes(roster.faults))
    # Of all strategies RETRY asks for the least: nobody is started anew, nobody counts down to the end.
    return Plan(Strategy.RETRY, f"the cluster manager is asked after {what}", participants=participants)
