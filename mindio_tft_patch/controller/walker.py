"""Walks one recovery after the other along the paths of protocol.phases: attempts, phases, their ends. No I/O.

A new attempt always begins with STOP, whatever the ranks were doing; its number fences the answers to older ones.
Every new attempt has fewer ranks or fewer strategies than the one before, and EXIT needs nobody's answer: so a
recovery ends.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Union

import msgspec

from mindio_tft_patch.controller import decide
from mindio_tft_patch.controller.events import Conclude, Instruction, Log, Send, Verdict, agent, processor
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.recovery import Recovery, Walk, record_of
from mindio_tft_patch.controller.roster import LOSING, Fault, RankState, Roster, named
from mindio_tft_patch.protocol.messages import Do, Done, Failed, Plan
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

Answer = Union[Done, Failed]

_ENDING = (Strategy.DUMP, Strategy.EXIT)
# Shares of the time that the launcher leaves (TTP_OT). STOP may have to wait for a save or a data loader to return,
# and there must be time for the dump, and for the EXIT that tells its path.
_STOP_SHARE, _CLEAN_SHARE, _DUMP_SHARE = 0.4, 0.4, 0.95
_EXIT_STOP_SHARE = 0.05  # nothing is to be saved: no reason to wait long
_SILENT_SHARE = 0.25  # of a phase: a participant without heartbeat for so long will not answer
_RESEND_SECONDS = 1.0
_DUMP_RETRIES = 1


class Walker:
    """The recoveries of one job.

    Args:
        options: sizes and durations.
        roster: what is known of every rank.

    Attributes:
        attempt: number of the current attempt; counts on over all recoveries.
        recovery: the one that is going on.
        verdict: how the job ends; None while it runs.
        out: instructions, for the machine to hand out.
    """

    def __init__(self, options: Options, roster: Roster) -> None:
        self._options = options
        self._roster = roster
        self._restarts = 0
        self._exit: Do | None = None
        self._exit_sent: dict[int, float] = {}
        self.attempt = 0
        self.recovery: Recovery | None = None
        self.verdict: Verdict | None = None
        self.out: list[Instruction] = []

    def missed_command(self, rank: int) -> None:
        """A rank has reconnected: tell it again what is waited for."""
        walk = self.recovery.walk if self.recovery else None
        if walk is not None and rank in walk.waiting:
            self.out.append(Send(processor(rank), Do(self.attempt, walk.phase, walk.plan)))

    def left(self, rank: int, now: float) -> None:
        """A rank has left training in good order."""
        recovery = self.recovery
        if recovery is not None and recovery.walk is not None and rank in recovery.walk.plan.participants:
            self._restart(recovery, now, f"rank {rank} has left training")

    def fault(self, fault: Fault, now: float) -> None:
        """Take in a fault that the roster has noted."""
        wait = self._options.collect_seconds
        if fault.kind in decide.SECONDARY:
            wait = decide.root_cause_seconds(self._roster, now)
        recovery = self.recovery
        if recovery is None:
            self.recovery = Recovery(began=now, decide_at=now + wait)
        elif recovery.walk is None:
            recovery.decide_at = min(recovery.decide_at or now, now + wait)
        else:
            self._fault_while_walking(recovery, recovery.walk, fault, now)

    def _fault_while_walking(self, recovery: Recovery, walk: Walk, fault: Fault, now: float) -> None:
        if walk.plan.strategy is Strategy.EXIT:
            if fault.kind in LOSING and fault.rank is not None:
                self._do_without(recovery, walk, fault.rank, now)
            return
        # Who has written its part of the checkpoint is not missed any more; the others say so if they do miss it.
        needed: Collection[int] = walk.waiting if walk.phase is Phase.DUMP else walk.plan.participants
        walk.lost = walk.lost or fault.kind in LOSING
        if decide.restart_needed(fault, needed, walk.plan.strategy, stopping=walk.phase is Phase.STOP):
            self._restart(recovery, now, str(fault))

    def _do_without(self, recovery: Recovery, walk: Walk, rank: int, now: float) -> None:
        """Nobody is needed for EXIT: a rank that is lost or fails is just not waited for."""
        if rank in walk.waiting:
            walk.waiting.discard(rank)
            if not walk.waiting:
                self._phase_over(recovery, walk, now)

    def _restart(self, recovery: Recovery, now: float, why: str, wait_seconds: float | None = None) -> None:
        """Begin a new attempt when what else happens in the same moment has been gathered."""
        if recovery.decide_at is None:
            recovery.decide_at = now + (self._options.collect_seconds if wait_seconds is None else wait_seconds)
            self.log("warning", f"attempt {self.attempt} is given up: {why}")
        elif wait_seconds is None:  # the root cause is known: no more waiting for it
            recovery.decide_at = min(recovery.decide_at, now + self._options.collect_seconds)

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
                self._begin(recovery, now)
            return []
        return [] if recovery.walk is None else self._overdue(recovery, recovery.walk, now)

    def _overdue(self, recovery: Recovery, walk: Walk, now: float) -> list[Fault]:
        late = now >= walk.deadline
        missing = [
            rank
            for rank in sorted(walk.waiting)
            if late or self._roster.ranks[rank].silent_for(now) >= self._patience(walk, rank, now)
        ]
        why = f"{walk.phase.value} was not answered within {now - walk.began:.1f} s"
        if missing and walk.plan.strategy not in _ENDING:
            recovery.excluded[walk.plan.strategy] = why
        return [Fault(rank, FaultKind.HANG, why) for rank in missing]

    def _patience(self, walk: Walk, rank: int, now: float) -> float:
        """Seconds of silence after which a rank will not answer any more."""
        least = 2 * self._options.silence_seconds
        if not self._roster.watched(rank, now):
            return least  # nobody will report its death, and torchrun leaves the survivors 30 s in all
        return max(least, _SILENT_SHARE * (walk.deadline - walk.began))

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
        if answer.commit is not None:
            state.commit = answer.commit
        if answer.phase is Phase.DUMP:
            recovery.checkpoint = recovery.checkpoint or answer.detail
        if not walk.waiting and recovery.decide_at is None:
            self._phase_over(recovery, walk, now)

    def _failed(self, recovery: Recovery, walk: Walk, state: RankState, answer: Failed, now: float) -> None:
        if walk.plan.strategy is Strategy.EXIT:
            self._do_without(recovery, walk, state.rank, now)
            return
        walk.waiting.discard(state.rank)
        walk.failures.append(answer)
        # The death that made it fail may be reported in a moment.
        wait = decide.root_cause_seconds(self._roster, now)
        self._restart(recovery, now, _why(answer), wait_seconds=wait)

    def _judge_failures(self, recovery: Recovery, walk: Walk) -> None:
        """An attempt was given up: what follows from the failures in it?"""
        for failure in walk.failures:
            if failure.phase in (Phase.STOP, Phase.CLEAN):  # local work: no other rank can be its cause
                self._roster.ranks[failure.rank].unusable = _why(failure)
        if walk.lost or not walk.failures or walk.phase in (Phase.STOP, Phase.CLEAN):
            return
        if walk.phase is not Phase.DUMP:
            recovery.excluded[walk.plan.strategy] = _why(walk.failures[0])
            return
        blamed = decide.blamed_for_dump(walk.failures, walk.plan.participants)
        for failure in blamed:
            self._roster.ranks[failure.rank].unfit = _why(failure)
        recovery.failed_dumps += 1
        if recovery.failed_dumps > _DUMP_RETRIES:
            recovery.excluded[Strategy.DUMP] = _why(blamed[0])

    # Attempts and phases.

    def _begin(self, recovery: Recovery, now: float) -> None:
        if self._restarts >= self._options.restart_budget:
            used_up = f"the job has used up its {self._options.restart_budget} restarts"
            recovery.excluded.setdefault(Strategy.RESPAWN, used_up)
        if recovery.dump_deadline is not None and now >= recovery.dump_deadline:
            late = f"the {self._options.dump_timeout_seconds:.0f} s of TTP_OT are over"
            recovery.excluded.setdefault(Strategy.DUMP, late)
        if recovery.walk is not None:
            recovery.count(recovery.walk.phase, now - recovery.walk.began)
            self._judge_failures(recovery, recovery.walk)
        first = recovery.walk is None
        plan, reason = decide.choose_strategy(self._roster, self._roster.faults, now, excluded=recovery.excluded)
        if plan.strategy in _ENDING and recovery.dump_deadline is None:
            # The launcher counts from the fault, unless the job was being kept alive until now.
            since = recovery.began if first else now
            recovery.dump_deadline = since + self._options.dump_timeout_seconds
        self.attempt += 1
        recovery.decide_at = None
        recovery.checkpoint = ""
        for state in self._roster.ranks.values():
            state.commit = None
        recovery.walk = Walk(plan)
        self.log("warning", f"decision: {reason}", strategy=plan.strategy.value, faulty=list(plan.faulty))
        self._enter(recovery, recovery.walk, now)

    def _enter(self, recovery: Recovery, walk: Walk, now: float) -> None:
        """Send the current phase."""
        plan, phase = walk.plan, walk.phase
        if phase is Phase.EXIT:
            self._conclude(recovery, plan, now)
            return
        walk.began, walk.deadline = now, now + self._allowed(recovery, walk, now)
        # A rank in its set-up has no guard yet that could answer.
        walk.waiting = {rank for rank in plan.participants if self._roster.ranks[rank].ready is not None}
        do = Do(self.attempt, phase, plan)
        # STOP goes to everybody: a rank that does not take part must not stay in a collective with those who do.
        hearers = [state.rank for state in self._roster.present()] if phase is Phase.STOP else plan.participants
        self.out += [Send(processor(rank), do) for rank in hearers]
        self.out += [Send(agent(node), do) for node in self._roster.agents]
        self.log("info", f"{phase.value}: sent to {named(hearers)}")
        if not walk.waiting:
            self._phase_over(recovery, walk, now)

    def _allowed(self, recovery: Recovery, walk: Walk, now: float) -> float:
        """Seconds for the current phase."""
        limit = self._options.phase_timeout_seconds
        if recovery.dump_deadline is None:
            return limit
        left = max(0.0, recovery.dump_deadline - now)
        if walk.plan.strategy is Strategy.EXIT:
            return min(limit, _EXIT_STOP_SHARE * self._options.dump_timeout_seconds)
        if walk.phase is Phase.DUMP:
            return _DUMP_SHARE * left  # a large model may take longer than a phase: TTP_OT is for that
        return min(limit, (_STOP_SHARE if walk.phase is Phase.STOP else _CLEAN_SHARE) * left)

    def _phase_over(self, recovery: Recovery, walk: Walk, now: float) -> None:
        recovery.count(walk.phase, now - walk.began)
        self.log("info", f"{walk.phase.value}: done in {now - walk.began:.3f} s")
        walk.began = now
        if walk.phase is Phase.STOP and not self._settle(recovery, walk, now):
            return
        if walk.following is None:
            self._recovered(recovery, walk, now)
            return
        walk.index += 1
        self._enter(recovery, walk, now)

    def _settle(self, recovery: Recovery, walk: Walk, now: float) -> bool:
        """After STOP: what to do is known now. False when a new attempt has begun instead."""
        decide.mark_unusable(self._roster)
        again, _ = decide.choose_strategy(self._roster, self._roster.faults, now, excluded=recovery.excluded)
        if again.strategy is not walk.plan.strategy:
            self._begin(recovery, now)
            return False
        if again.strategy in (Strategy.EXIT, Strategy.RELOAD):
            walk.plan = again
            return True
        target, why = decide.choose_target(self._roster)
        if target is not None and again.strategy is Strategy.DUMP:
            nothing = decide.nothing_to_save(self._roster, target)
            target, why = (None, nothing) if nothing else (target, why)
        if target is None:
            recovery.excluded[again.strategy] = why
            self._begin(recovery, now)
            return False
        sources, _ = decide.choose_sources(self._roster, target)
        reached = [rank for rank in again.participants if decide.reaches(self._roster.ranks[rank], target)]
        walk.plan = msgspec.structs.replace(
            again,
            reason=f"{again.reason}; {why}",
            target_step=target,
            participants=tuple(reached),
            sources=sources or (),
        )
        self.log("info", f"target: {why}", step=target, participants=reached)
        return True

    # Ends.

    def _recovered(self, recovery: Recovery, walk: Walk, now: float) -> None:
        record = record_of(recovery, self._roster, walk.plan, self.attempt, now)
        if walk.plan.strategy is Strategy.RESPAWN:
            self._restarts += len(walk.plan.faulty)
        self.recovery = None
        self._roster.forget_recovery()
        self._roster.progress_at = now
        self._write_record(record)

    def _conclude(self, recovery: Recovery, plan: Plan, now: float) -> None:
        plan = msgspec.structs.replace(plan, detail=recovery.checkpoint)
        record = record_of(recovery, self._roster, plan, self.attempt, now)
        step = plan.target_step if plan.strategy is Strategy.DUMP else 0
        self.verdict = Verdict(plan.strategy, plan.reason, recovery.checkpoint, step, record)
        self._exit = Do(self.attempt, Phase.EXIT, plan)
        self.out.append(Conclude(self.verdict))
        # Also to ranks that could not be saved or did not answer: whoever can still hear it should end with the reason.
        for state in self._roster.ranks.values():
            if state.registered is not None and not state.dead and not state.finished:
                self.out.append(Send(processor(state.rank), self._exit))
                self._exit_sent[state.rank] = now
        self.out += [Send(agent(node), self._exit) for node in self._roster.agents]
        self.log("warning", f"the job ends: {plan.reason}", checkpoint=recovery.checkpoint)
        self._write_record(record)

    def repeat_exit(self, state: RankState, now: float) -> None:
        """A rank that goes on beating after EXIT may have missed it."""
        heard = state.progress.activity if state.progress else Activity.SETUP
        lately = now - self._exit_sent.get(state.rank, now) < _RESEND_SECONDS
        if self._exit is None or heard is Activity.FINISHED or lately:
            return
        self._exit_sent[state.rank] = now
        self.out.append(Send(processor(state.rank), self._exit))

    def _write_record(self, record: dict[str, object]) -> None:
        self.out.append(Log("info", msgspec.json.encode(record).decode(), record))

    def log(self, level: str, text: str, **fields: object) -> None:
        """Add a line to the log."""
        recovery = self.recovery
        walk = recovery.walk if recovery else None
        place = {"attempt": self.attempt, "phase": walk.phase.value if walk else ""}
        self.out.append(Log(level, text, {**place, **fields}))


def _why(failure: Failed) -> str:
    return f"{failure.phase.value} failed on rank {failure.rank}: {failure.reason}"
