"""Which plan an attempt has: the ladder of decide.py with what this recovery has shown. No I/O.

Three times in an attempt: when it begins, when STOP has shown how far everybody is, when a checkpoint was loaded.
"""

from __future__ import annotations

import msgspec

from mindio_tft_patch.controller import decide, targets
from mindio_tft_patch.controller.budget import Budget, Recovered
from mindio_tft_patch.controller.negotiator import stop_plan
from mindio_tft_patch.controller.recovery import Recovery, Walk
from mindio_tft_patch.controller.roster import Roster, named
from mindio_tft_patch.controller.targets import IN_PLACE
from mindio_tft_patch.protocol.messages import Plan
from mindio_tft_patch.protocol.phases import LADDER, FaultKind, Strategy

ENDING = (Strategy.DUMP, Strategy.EXIT)
_ORDERS_MAX = 3  # for one rank in one recovery: a process that does not come up will not do so the fourth time


class Chooser:
    """Chooses for one job.

    Args:
        roster: what is known of every rank.
        budget: how often the job may be recovered in place.
    """

    def __init__(self, roster: Roster, budget: Budget) -> None:
        self._roster = roster
        self._budget = budget

    def begin(self, recovery: Recovery, now: float) -> Plan:
        """For a new attempt. With a deal whose choice does not fit any more it only stops, and the deal knows why."""
        deal = recovery.deal
        if deal is None:
            return self._best(recovery, now)
        if deal.chosen:
            plan = self._best(recovery, now)
            if plan.strategy in deal.among:
                return plan
            deal.fails(plan.reason)
        return stop_plan(self._roster)

    def _best(self, recovery: Recovery, now: float) -> Plan:
        while True:
            plan = self._rung(recovery, now)
            if plan.strategy in ENDING:
                return plan
            often = [rank for rank in plan.lost if recovery.ordered[rank] >= _ORDERS_MAX]
            if recovery.deal is not None:  # nobody counts what the cluster manager starts
                often += [rank for rank in plan.faulty if self._losses(rank) > _ORDERS_MAX]
            if often:
                objection = f"{named(often)} was started anew {_ORDERS_MAX} times and was lost each time"
            elif recovery.dump_deadline is not None:
                objection = "the launchers have begun to end the job"
            else:
                return plan
            recovery.excluded[plan.strategy] = objection

    def _losses(self, rank: int) -> int:
        """How often a process of the rank was lost in this recovery."""
        faults = self._roster.own_faults(rank)
        return sum(1 for fault in faults if fault.losing and fault.kind is not FaultKind.DECLARED)

    def _rung(self, recovery: Recovery, now: float) -> Plan:
        deal = recovery.deal
        plan, _ = decide.choose_strategy(
            self._roster,
            self._roster.faults,
            now,
            excluded=recovery.excluded,
            among=LADDER if deal is None else deal.among,
            managed=deal is not None,
        )
        return plan

    def settle(self, recovery: Recovery, walk: Walk, now: float) -> tuple[Plan | None, str]:
        """After STOP: the plan with its target, and why that one; None when another attempt is needed."""
        targets.mark_unusable(self._roster)
        again = self._rung(recovery, now)
        if again.strategy is not walk.plan.strategy or again.lost:
            return None, ""
        again = msgspec.structs.replace(again, lost=walk.plan.lost)
        plan, trouble = targets.aim(again, self._roster)
        if plan is not None and plan.strategy in IN_PLACE:
            trouble = self._budget.repeated(recovered_by(recovery, plan))
        if plan is None or trouble:
            recovery.excluded[again.strategy] = trouble
            return None, trouble
        return plan, plan.reason[len(again.reason) :].lstrip("; ")

    def loaded(self, recovery: Recovery, walk: Walk) -> Plan | None:
        """After the ROLLBACK of a reload: the plan with the step that was loaded; None when another one is needed."""
        steps = {
            state.commit.step
            for state in (self._roster.ranks[rank] for rank in walk.plan.participants)
            if state.commit is not None
        }
        if len(steps) == 1:
            return msgspec.structs.replace(walk.plan, target_step=steps.pop())
        recovery.excluded[Strategy.RELOAD] = f"the ranks have loaded different steps: {sorted(steps)}"
        return None


def recovered_by(recovery: Recovery, plan: Plan) -> Recovered:
    """What the budget remembers of a recovery."""
    step = recovery.completed if plan.strategy is Strategy.RELOAD else plan.target_step
    return Recovered(plan.strategy, step, plan.faulty)
