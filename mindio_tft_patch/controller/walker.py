"""Walks one recovery after the other along the paths of protocol.phases: attempts, phases, their ends. No I/O.

A new attempt always begins with STOP, whatever the ranks were doing; its number fences the answers to older ones.
Every new attempt has fewer ranks or fewer strategies than the one before, or orders a process anew, which happens a few
times for each rank at most; and EXIT needs nobody's answer: so a recovery ends.

    STOP, CLEAN --(hold: until every process that was ordered is ready)--> REBUILD ... RESUME

With a cluster manager attached (controller.negotiator) there are attempts of STOP alone: when all have stopped the
manager is asked what to do, and its choice is the next attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Union

import msgspec

from mindio_tft_patch.controller import decide, limits, watch
from mindio_tft_patch.controller.budget import Budget
from mindio_tft_patch.controller.choose import ENDING, Chooser, recovered_by
from mindio_tft_patch.controller.events import Instruction, Log, Send, Tell, Verdict, agent, processor
from mindio_tft_patch.controller.farewell import Farewell
from mindio_tft_patch.controller.judge import judge, why
from mindio_tft_patch.controller.negotiator import Negotiator
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.recovery import Recovery, Walk, record_of, words_of
from mindio_tft_patch.controller.roster import LOSING, Fault, RankState, Roster, named
from mindio_tft_patch.controller.targets import IN_PLACE
from mindio_tft_patch.protocol.messages import Do, Done, Failed, Plan
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

Answer = Union[Done, Failed]

_LOCAL = (Phase.STOP, Phase.CLEAN)  # each rank by itself: who does not answer is the one to blame


class Walker:
    """The recoveries of one job.

    Args:
        options: sizes and durations.
        roster: what is known of every rank.

    Attributes:
        attempt: number of the current attempt; counts on over all recoveries.
        recovery: the one that is going on.
        out: instructions, for the machine to hand out.
        negotiator: speaks with the cluster manager, when there is one.
    """

    def __init__(self, options: Options, roster: Roster) -> None:
        self._options = options
        self._roster = roster
        self._budget = Budget(options.restart_budget)
        self._chooser = Chooser(roster, self._budget)
        self._farewell = Farewell(roster)
        self.attempt = 0
        self.recovery: Recovery | None = None
        self.out: list[Instruction] = []
        self.negotiator = Negotiator(options, roster, lambda report: self.out.append(Tell(report)))

    @property
    def verdict(self) -> Verdict | None:
        """How the job ends; None while it runs."""
        return self._farewell.verdict

    def count_attempt(self) -> int:
        """A number that no command has had, also not of a controller before this one: ranks drop older ones."""
        self.attempt = max(self.attempt, self._roster.attempt) + 1
        return self.attempt

    @property
    def open(self) -> bool:
        """A recovery is going on, and the job may still stay up."""
        walk = self.recovery.walk if self.recovery else None
        return self.recovery is not None and (walk is None or walk.plan.strategy in IN_PLACE)

    # What happens meanwhile.

    def missed_command(self, rank: int) -> None:
        """A rank has reconnected: tell it again what is waited for."""
        walk = self.recovery.walk if self.recovery else None
        if walk is not None and rank in walk.waiting:
            self.out.append(Send(processor(rank), Do(self.attempt, walk.phase, walk.plan)))

    def left(self, rank: int, now: float) -> None:
        """A rank has left training in good order."""
        recovery = self.recovery
        walk = recovery.walk if recovery else None
        if recovery is None or walk is None or rank not in walk.plan.participants:
            return
        # After the last step those who have resumed leave at once, some before others have answered.
        if walk.phase is not Phase.RESUME or rank in walk.waiting:
            self.restart(recovery, now, f"rank {rank} has left training")

    def ready(self, state: RankState, now: float) -> None:
        """A rank has said, or said anew, what it can do."""
        recovery = self.recovery
        walk = recovery.walk if recovery else None
        if recovery is None or walk is None or walk.plan.strategy in ENDING or state.ready is None or walk.asking:
            return
        if walk.plan.strategy not in state.ready.strategies:
            self.restart(recovery, now, f"rank {state.rank} does not offer {walk.plan.strategy.value} any more")
        elif walk.holding and recovery.decide_at is None:
            self._hold(recovery, walk, now)

    def relaunched(self, ranks: Iterable[int], now: float) -> None:
        """The agent of these ranks was started again, and starts them of its own accord."""
        recovery = self.recovery
        if recovery is not None and recovery.walk is not None and set(ranks) & set(recovery.walk.plan.lost):
            # What was ordered from the agent before it must not be done once more.
            self.restart(recovery, now, f"the launcher of {named(ranks)} was started again")

    def reachable(self, rank: int, now: float) -> None:
        """A rank that was out of reach can be spoken to again, and nothing was done about it yet."""
        if self.recovery is not None and self.recovery.walk is not None:
            self.restart(self.recovery, now, f"rank {rank} can be reached again")

    def fault(self, fault: Fault, now: float) -> None:
        """Take in a fault that the roster has noted."""
        wait = self._options.collect_seconds
        if fault.kind in watch.SECONDARY:
            wait = watch.root_cause_seconds(self._roster, now)
        recovery = self.recovery
        if recovery is None:
            self.recovery = Recovery(began=now, decide_at=now + wait, deal=self.negotiator.deal())
        elif recovery.walk is None:
            recovery.decide_at = min(recovery.decide_at or now, now + wait)
        else:
            self._fault_while_walking(recovery, recovery.walk, fault, now)

    def _fault_while_walking(self, recovery: Recovery, walk: Walk, fault: Fault, now: float) -> None:
        plan = walk.plan
        if plan.strategy is Strategy.EXIT:
            if fault.kind in LOSING and fault.rank is not None:
                self.do_without(recovery, walk, fault.rank, now)
            return
        needed: Collection[int] = plan.participants
        if plan.strategy in IN_PLACE:
            # Also whoever has come back and has not answered yet, though the plan does not know it.
            needed = {*needed, *plan.faulty, *walk.waiting}
        elif walk.phase is Phase.DUMP:
            # Who has written its part of the checkpoint is not missed any more; the others say so if they do miss it.
            needed = walk.waiting
        walk.lost = walk.lost or fault.losing
        if decide.restart_needed(fault, needed, plan.strategy, stopping=walk.phase is Phase.STOP):
            self.restart(recovery, now, str(fault))

    def do_without(self, recovery: Recovery, walk: Walk, rank: int, now: float) -> None:
        """Do not wait for a rank: nobody is needed for EXIT, and one that was declared faulty will not answer."""
        if rank in walk.waiting:
            walk.waiting.discard(rank)
            if not walk.waiting:
                self._phase_over(recovery, walk, now)

    # The cluster manager.

    def alone(self, now: float, reason: str) -> None:
        """The cluster manager has no part in this recovery any more, for a reason; empty: it has."""
        recovery = self.recovery
        if not reason or recovery is None or recovery.deal is None:
            return
        recovery.deal = None
        self.log("warning", f"the controller decides by itself: {reason}")
        if recovery.walk is not None and recovery.walk.asking:
            self.restart(recovery, now, reason, wait_seconds=0.0)

    def restart(self, recovery: Recovery, now: float, reason: str, wait_seconds: float | None = None) -> None:
        """Begin a new attempt when what else happens in the same moment has been gathered."""
        if recovery.decide_at is None:
            recovery.decide_at = now + (self._options.collect_seconds if wait_seconds is None else wait_seconds)
            self.log("warning", f"attempt {self.attempt} is given up: {reason}")
        elif wait_seconds is None:  # the root cause is known: no more waiting for it
            recovery.decide_at = min(recovery.decide_at, now + self._options.collect_seconds)

    # Time.

    def tick(self, now: float) -> list[Fault]:
        """Time has passed.

        Returns:
            Ranks that have not answered in time; the machine has them noted and hands them to `fault`.
        """
        recovery = self.recovery
        if recovery is None or self.verdict is not None:
            return []
        if recovery.decide_at is not None:
            if now >= recovery.decide_at:
                self.begin(recovery, now)
            return []
        walk = recovery.walk
        tick = self._tick_asking if walk is not None and walk.asking else self._tick_walking
        return [] if walk is None else tick(recovery, walk, now)

    def _tick_walking(self, recovery: Recovery, walk: Walk, now: float) -> list[Fault]:
        states = self._roster.ranks.values()
        unordered = [s.rank for s in states if s.lost and not s.awaited and self._roster.watched(s.rank, now)]
        if unordered and walk.plan.strategy in IN_PLACE:
            self.restart(recovery, now, f"the launcher of {named(unordered)} can be reached again")
            return []
        silent = limits.silent(self._roster, walk, now)
        if not silent and walk.holding:
            self._hold(recovery, walk, now)
        elif not silent and now >= walk.deadline:
            return self._overdue(recovery, walk, now)
        return silent

    def _tick_asking(self, recovery: Recovery, walk: Walk, now: float) -> list[Fault]:
        found = limits.silent(self._roster, walk, now)
        if not found and not walk.consulting and now >= walk.deadline:
            return self._overdue(recovery, walk, now)
        if not found:
            self.alone(now, self.negotiator.overdue(recovery, now, consulting=walk.consulting))
        return found

    def _overdue(self, recovery: Recovery, walk: Walk, now: float) -> list[Fault]:
        reason = f"{walk.phase.value} was not answered within {now - walk.began:.1f} s"
        if walk.plan.strategy in ENDING or walk.phase in _LOCAL:
            return [Fault(rank, FaultKind.HANG, reason) for rank in sorted(walk.waiting)]
        # One rank that is stuck keeps all others waiting: it is the next STOP that tells them apart.
        recovery.excluded[walk.plan.strategy] = f"{reason} by {named(walk.waiting)}"
        self.restart(recovery, now, reason)
        return []

    def _missing(self, walk: Walk) -> list[int]:
        if Phase.REBUILD is not walk.following:
            return []
        return [rank for rank in walk.plan.faulty if not self._roster.ranks[rank].back]

    def _hold(self, recovery: Recovery, walk: Walk, now: float) -> None:
        """Before REBUILD: are all ranks there again?"""
        missing = self._missing(walk)
        if not missing:
            recovery.count(walk, now)
            self.log("info", f"every rank is back after {now - walk.began:.3f} s")
            walk.holding = False
            self._next(recovery, walk, now)
        elif now >= walk.deadline:
            reason = f"{named(missing)} did not come back within {self._options.return_seconds:.0f} s"
            recovery.excluded[Strategy.RESPAWN] = recovery.excluded[Strategy.RELOAD] = reason
            self.restart(recovery, now, reason)

    # Answers.

    def answer(self, state: RankState, answer: Answer, now: float) -> None:
        """A rank has answered a command."""
        recovery = self.recovery
        walk = recovery.walk if recovery else None
        if recovery is None or walk is None or (answer.attempt, answer.phase) != (self.attempt, walk.phase):
            self.log("debug", f"dropped a stale answer of rank {state.rank} to {answer.phase.value}")
            return
        if state.rank not in walk.waiting:
            return
        if isinstance(answer, Failed):
            self._failed(recovery, walk, state, answer, now)
            return
        walk.waiting.discard(state.rank)
        recovery.bytes_moved += answer.bytes_moved
        recovery.note_commit(state, answer)
        if answer.phase is Phase.DUMP:
            recovery.checkpoint = recovery.checkpoint or answer.detail
        if not walk.waiting and recovery.decide_at is None:
            self._phase_over(recovery, walk, now)

    def _failed(self, recovery: Recovery, walk: Walk, state: RankState, answer: Failed, now: float) -> None:
        if walk.plan.strategy is Strategy.EXIT:
            self.do_without(recovery, walk, state.rank, now)
            return
        walk.waiting.discard(state.rank)
        walk.failures.append(answer)
        # The death that made it fail may be reported in a moment.
        wait = watch.root_cause_seconds(self._roster, now)
        if answer.phase is Phase.DUMP:  # whoever is blamed for it is left out of the next one: be sure
            wait = max(wait, self._options.collect_seconds + self._options.heartbeat_seconds)
        self.restart(recovery, now, why(answer), wait_seconds=wait)

    # Attempts and phases.

    def begin(self, recovery: Recovery, now: float) -> None:
        """Begin a new attempt, at once."""
        for strategy, used_up in self._budget.exhausted().items():
            recovery.excluded.setdefault(strategy, used_up)
        if recovery.dump_deadline is not None and now >= recovery.dump_deadline:
            late = f"the {self._options.dump_timeout_seconds:.0f} s of TTP_OT are over"
            recovery.excluded.setdefault(Strategy.DUMP, late)
        first = recovery.walk is None
        if recovery.walk is not None:
            recovery.count(recovery.walk, now)
            judge(recovery, recovery.walk, self._roster)
        self.alone(now, self.negotiator.begins(recovery, now))
        plan = self._chooser.begin(recovery, now)
        asking = recovery.deal is not None and not recovery.deal.chosen
        if plan.strategy in ENDING and recovery.dump_deadline is None:
            # The launcher counts from the fault, unless the job was being kept alive until now.
            since = recovery.began if first else now
            recovery.dump_deadline = since + self._options.dump_timeout_seconds
        self.count_attempt()
        recovery.begin(plan, self._roster, asking=asking)
        lost = {"lost": list(plan.lost)} if plan.lost else {}
        self.log("warning", f"decision: {plan.reason}", strategy=plan.strategy.value, faulty=list(plan.faulty), **lost)
        assert recovery.walk is not None
        self._enter(recovery, recovery.walk, now)

    def _enter(self, recovery: Recovery, walk: Walk, now: float) -> None:
        """Send the current phase."""
        plan, phase = walk.plan, walk.phase
        if phase is Phase.EXIT:
            self._conclude(recovery, plan, now)
            return
        walk.began, walk.deadline = now, now + limits.allowed(self._options, recovery, walk, now)
        hearers = list(plan.participants)
        if phase is Phase.STOP:
            # To everybody: a rank that does not take part must not stay in a collective with those who do. Only one
            # that sets itself up anew is in none, and is not to be disturbed.
            hearers = [s.rank for s in self._roster.present() if s.ready is not None or not s.returning]
        awaited = set(plan.participants)
        if plan.strategy in IN_PLACE:
            # One that came back waits in its guard, perhaps in a phase of an attempt that was given up.
            awaited |= {rank for rank in hearers if self._roster.ranks[rank].returning}
        # A rank in its set-up has no guard yet that could answer.
        walk.waiting = {rank for rank in awaited if self._roster.ranks[rank].ready is not None}
        do = Do(self.attempt, phase, plan)
        self.out += [Send(processor(rank), do) for rank in hearers]
        self.out += [Send(agent(node), do) for node in self._roster.agents]
        self.log("info", f"{phase.value}: sent to {named(hearers)}")
        if not walk.waiting:
            self._phase_over(recovery, walk, now)

    def _phase_over(self, recovery: Recovery, walk: Walk, now: float) -> None:
        recovery.count(walk, now)
        self.log("info", f"{walk.phase.value}: done in {now - walk.began:.3f} s")
        walk.began = now
        if walk.asking:
            walk.consulting = True
            self.alone(now, self.negotiator.stopped(recovery, now))
            return
        if not self._learn(recovery, walk, now):
            self.begin(recovery, now)
            return
        if walk.following is None:
            self._recovered(recovery, walk, now)
            return
        missing = self._missing(walk)
        if missing:
            walk.holding, walk.deadline = True, now + self._options.return_seconds
            self.log("info", f"waiting for {named(missing)} to come back, {self._options.return_seconds:.0f} s at most")
            return
        self._next(recovery, walk, now)

    def _learn(self, recovery: Recovery, walk: Walk, now: float) -> bool:
        """What the phase that is over has shown. False when another attempt is needed."""
        plan: Plan | None = walk.plan
        if walk.phase is Phase.STOP:
            plan, reason = self._chooser.settle(recovery, walk, now)
            if plan is not None and plan.sources:
                self.log("info", f"target: {reason}", step=plan.target_step, participants=list(plan.participants))
        elif walk.phase is Phase.ROLLBACK and walk.plan.strategy is Strategy.RELOAD:
            plan = self._chooser.loaded(recovery, walk)
        walk.plan = walk.plan if plan is None else plan
        return plan is not None

    def _next(self, recovery: Recovery, walk: Walk, now: float) -> None:
        if walk.following is Phase.REBUILD:
            back = [rank for rank in walk.plan.faulty if self._roster.ranks[rank].back]
            everybody = tuple(sorted({*walk.plan.participants, *back}))
            walk.plan = msgspec.structs.replace(walk.plan, participants=everybody)
        walk.index += 1
        self._enter(recovery, walk, now)

    # Ends.

    def _recovered(self, recovery: Recovery, walk: Walk, now: float) -> None:
        self._budget.add(recovered_by(recovery, walk.plan))
        record = record_of(recovery, self._roster, walk.plan, self._budget.left, now)
        self.negotiator.recovered(walk.plan)
        self.recovery = None
        self._roster.forget_recovery()
        self._roster.progress_at = now
        self._write_record(record)

    def _conclude(self, recovery: Recovery, plan: Plan, now: float) -> None:
        record = record_of(recovery, self._roster, plan, self._budget.left, now)
        self.out += self._farewell.conclude(self.attempt, plan, recovery.checkpoint, record, now)
        self.negotiator.concluded(plan)
        self.log("warning", f"the job ends: {plan.reason}", checkpoint=recovery.checkpoint)
        self._write_record(record)

    def repeat_exit(self, state: RankState, now: float) -> None:
        """A rank that goes on beating after EXIT may have missed it."""
        self.out += self._farewell.repeat(state, now)

    def _write_record(self, record: dict[str, object]) -> None:
        self.out.append(Log("info", words_of(record), record))

    def log(self, level: str, text: str, **fields: object) -> None:
        """Add a line to the log."""
        recovery = self.recovery
        walk = recovery.walk if recovery else None
        place = {"attempt": self.attempt, "phase": walk.phase.value if walk else ""}
        self.out.append(Log(level, text, {**place, **fields}))
