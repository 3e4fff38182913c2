"""Every decision, as a pure function of the roster: `(roster, ...) -> (result, reason in words)`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mindio_tft_patch.controller.roster import LONG_WORK, LOSING, Fault, RankState, Roster, named
from mindio_tft_patch.protocol.messages import Failed, Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import LADDER, FaultKind, Strategy

# A first step compiles kernels and builds caches; with nothing measured yet, a rank that gives signs of life gets more.
FIRST_STEP_FACTOR = 5.0
MEDIAN_STEPS = 10.0

# Reported by ranks that suffer from somebody else's fault: worth a wait for the root cause.
SECONDARY = frozenset({FaultKind.COLLATERAL, FaultKind.NETWORK})
# Kinds that recomputing the step in place can cure.
_RETRIABLE = frozenset({FaultKind.MEMORY, FaultKind.NETWORK, FaultKind.COLLATERAL})
# Kinds that would happen again, or that ask the job to end: only saving helps.
_FINAL = frozenset({FaultKind.TERMINATED, FaultKind.EXCEPTION})


def hang_limit(roster: Roster) -> float:
    """Seconds without a completed step after which the job hangs."""
    steps = [state.progress.step_seconds for state in roster.present() if state.progress]
    longest = max((seconds for seconds in steps if seconds is not None), default=0.0)
    return max(roster.options.hang_seconds, MEDIAN_STEPS * longest)


def find_hang(roster: Roster, now: float) -> tuple[tuple[Fault, ...], str]:
    """Does the job hang, and who is to blame?

    A rank that is inside a collective waits for somebody; who is to blame is not inside one. While a rank reports long
    work (a save, an evaluation) nobody is to blame but a rank that gives no sign of life.

    Returns:
        The culprits, or one fault of the whole job when nobody can be blamed; empty when the job does not hang.
    """
    limit = hang_limit(roster)
    present = [state for state in roster.present() if state.progress is not None]
    about = 0.5 * limit  # ranks do not begin to wait in the same moment
    silent = [state for state in present if state.silent_for(now) >= limit]
    speaking = [state for state in present if state.silent_for(now) < roster.options.silence_seconds]
    waiting = [state for state in speaking if _waits(state, about)]
    if silent and (waiting or not speaking):
        # In any activity: a stopped process goes on claiming what it did last.
        detail = f"no sign of life for {limit:.0f} s while other ranks wait for it"
        return tuple(Fault(state.rank, FaultKind.HANG, detail) for state in silent), detail
    quiet = 0.0 if roster.progress_at is None else now - roster.progress_at
    patience = limit if roster.stepped else FIRST_STEP_FACTOR * limit
    if quiet < patience or not waiting or not _all_training(present):
        return (), f"no step for {quiet:.0f} s of {patience:.0f} s, {len(waiting)} ranks wait for others"
    # A rank that just falls short of `silent` is a better suspect than one that speaks and does not wait.
    culprits = [state for state in present if state not in speaking]
    culprits = culprits or [state for state in speaking if not _waits(state, about)]
    if not culprits:
        detail = f"no step for {quiet:.0f} s, every rank waits in a collective: nobody can be blamed"
        return (Fault(None, FaultKind.HANG, detail),), detail
    detail = f"no step for {quiet:.0f} s, and this rank is not in a collective while {_named(waiting)} waits in one"
    return tuple(Fault(state.rank, FaultKind.HANG, detail) for state in culprits), detail


def find_lost(roster: Roster, now: float) -> tuple[tuple[Fault, ...], str]:
    """Ranks without heartbeat that no agent watches, when others wait for them or suffer.

    Silence alone says little: a stopped process, a main thread that holds the interpreter lock.
    """
    limit = roster.options.silence_seconds
    silent = [s for s in roster.present() if s.silent_for(now) >= limit and not roster.watched(s.rank, now)]
    speaking = [state for state in roster.present() if state.silent_for(now) < limit]
    suffering = {fault.rank for fault in roster.faults if fault.kind in SECONDARY}
    missed = [state.rank for state in speaking if _waits(state, limit) or state.rank in suffering]
    if not silent or not missed:
        return (), f"{len(silent)} unwatched ranks are silent, {len(missed)} ranks miss somebody"
    detail = f"no heartbeat for {limit:.1f} s while {named(missed)} waits or suffers, and no agent can say more"
    return tuple(Fault(state.rank, FaultKind.HEARTBEAT_LOST, detail) for state in silent), detail


def _named(states: Sequence[RankState]) -> str:
    return named(state.rank for state in states)


def _waits(state: RankState, at_least_seconds: float) -> bool:
    waited = state.progress.in_collective_seconds if state.progress else None
    return waited is not None and waited >= at_least_seconds


def _all_training(states: Sequence[RankState]) -> bool:
    return not any(state.progress and state.progress.activity in LONG_WORK for state in states)


def root_cause_seconds(roster: Roster, now: float) -> float:
    """How long to wait for the root cause when only ranks that suffer from it have reported.

    An agent reports a death within moments, but a peer may see the closed connection first; without an agent it takes
    the missed heartbeats.
    """
    options = roster.options
    if all(roster.watched(rank, now) for rank in roster.ranks):
        return options.collect_seconds + options.heartbeat_seconds
    return options.collect_seconds + options.silence_seconds + options.heartbeat_seconds


def mark_unusable(roster: Roster) -> None:
    """After STOP: a rank that had a fault of its own inside the local update has a half-done state."""
    for state in roster.healthy():
        commit = state.commit
        if commit is not None and commit.updating is not None and roster.own_faults(state.rank):
            state.unusable = f"its fault lies inside the optimizer update of step {commit.updating}"


def choose_target(roster: Roster) -> tuple[int | None, str]:
    """The step that all state has after the recovery; None when no step is covered. Called after STOP.

    S is the smallest completed step. When any rank has passed the gate for S+1, so has every rank (the gate is a
    barrier) and every rank can complete it: the target is S+1, and a completed step is not lost. When that is not
    covered, S is tried; states of different steps are never mixed.
    """
    commits = {state.rank: state.commit for state in roster.healthy() if state.commit is not None}
    if not commits:
        return None, "no rank answered with a usable state"
    lowest = min(commit.step for commit in commits.values())
    # The next step is lowest + 1 unless the framework left iterations out (bad data, --iterations-to-skip).
    ahead = {rank: commit.updating or commit.step for rank, commit in commits.items()}
    highest = max(ahead.values())
    if highest == lowest:
        reason = f"step {lowest} is the last completed one"
        sources, trouble = choose_sources(roster, lowest)
        return (lowest, reason) if sources is not None else (None, trouble)
    passed = [rank for rank, step in ahead.items() if step == highest]
    sources, trouble = choose_sources(roster, highest)
    if sources is not None:
        return highest, f"step {highest}: {named(passed)} has passed the gate for it, so all complete it"
    if choose_sources(roster, lowest)[0] is not None:
        return lowest, f"step {lowest}, since step {highest} is not covered: {trouble}"
    return None, trouble


def reaches(state: RankState, target: int) -> bool:
    """True when the rank's state is at the target or will be after CLEAN. Called after STOP."""
    commit = state.commit
    if not state.healthy or commit is None:
        return False
    if commit.step == target:
        return commit.updating is None
    return target in (commit.at_gate, commit.updating)


def choose_sources(roster: Roster, target: int) -> tuple[tuple[ShardSource, ...] | None, str]:
    """The rank that speaks for each replica set at the target; None when a set has nobody. Called after STOP."""
    return _cover(
        roster,
        lambda state: reaches(state, target) and not state.unfit,
        lambda state: state.trouble or f"is at step {state.commit.step if state.commit else '?'}, not {target}",
    )


def _cover(
    roster: Roster, usable: Callable[[RankState], bool], trouble: Callable[[RankState], str]
) -> tuple[tuple[ShardSource, ...] | None, str]:
    sources: list[ShardSource] = []
    for replica_set in roster.replica_sets():
        members = [roster.ranks[rank] for rank in replica_set.ranks if rank in roster.ranks]
        holders = [state for state in members if usable(state)]
        if not holders:
            return None, _uncovered(replica_set, members, trouble)
        # A rank without a fault of its own first: its memory and its files are beyond suspicion.
        best = min(holders, key=lambda state: (bool(roster.own_faults(state.rank)), state.rank))
        sources.append(ShardSource(replica_set, best.rank))
    if not sources:
        return None, "no rank has named a replica set"
    return tuple(sources), "every replica set has a healthy rank"


def _uncovered(replica_set: ReplicaSet, members: Sequence[RankState], trouble: Callable[[RankState], str]) -> str:
    holders = "; ".join(f"rank {state.rank}: {trouble(state)}" for state in members)
    return f"no usable copy of the {replica_set.name} optimizer shard of {named(replica_set.ranks)} is left ({holders})"


@dataclass(frozen=True)
class Situation:
    """What a rule of the ladder looks at."""

    roster: Roster
    faults: Sequence[Fault]
    now: float

    @property
    def kinds(self) -> frozenset[FaultKind]:
        """Kinds of all faults."""
        return frozenset(fault.kind for fault in self.faults)


def _misfit_retry(situation: Situation) -> str:
    others = situation.kinds - _RETRIABLE
    if others:
        return f"{', '.join(sorted(kind.value for kind in others))} is not cured by computing again"
    return _misfit_coverage(situation)


def _misfit_respawn(situation: Situation) -> str:
    final = situation.kinds & _FINAL
    if final:
        return f"{', '.join(sorted(kind.value for kind in final))} is not cured by a new process"
    unwatched = [rank for rank in situation.roster.faulty() if not situation.roster.watched(rank, situation.now)]
    if unwatched:
        return f"no agent can restart {named(unwatched)}"
    return _misfit_coverage(situation)


def _misfit_reload(situation: Situation) -> str:
    final = situation.kinds & _FINAL
    if final:
        return f"{', '.join(sorted(kind.value for kind in final))} is not cured by loading a checkpoint"
    gone = [rank for rank in situation.roster.faulty() if not situation.roster.watched(rank, situation.now)]
    return f"no agent can restart {named(gone)}" if gone else ""


def _misfit_coverage(situation: Situation) -> str:
    roster = situation.roster
    unready = [rank for rank, state in roster.ranks.items() if state.ready is None]
    if unready:
        return f"{named(unready)} did not finish the set-up, so there is no trained state to keep"
    sources, trouble = _cover(roster, lambda state: state.healthy and not state.unfit, lambda state: state.trouble)
    return "" if sources is not None else trouble


_MISFITS: dict[Strategy, Callable[[Situation], str]] = {
    Strategy.RETRY: _misfit_retry,
    Strategy.RESPAWN: _misfit_respawn,
    Strategy.RELOAD: _misfit_reload,
    Strategy.DUMP: _misfit_coverage,
    Strategy.EXIT: lambda situation: "",
}


def choose_strategy(
    roster: Roster,
    faults: Sequence[Fault],
    now: float,
    *,
    excluded: Mapping[Strategy, str],
) -> tuple[Plan, str]:
    """The first strategy of the ladder that every healthy rank offers, that has not failed, and that fits the faults.

    Args:
        excluded: strategies that failed in this recovery or are used up, with the reason.

    Returns:
        A plan without target and sources (those need the answers to STOP), and the reason, which names the faults and
        why the rungs above do not fit.
    """
    situation = Situation(roster, faults, now)
    happened = summary(root_causes(faults))
    passed_over: list[str] = []
    for strategy in LADDER:
        misfit = "" if _offered(roster, strategy) else None
        if misfit is None:
            continue  # not switched on by the user's flags: not worth a word in every reason
        misfit = excluded.get(strategy) or _MISFITS[strategy](situation)
        if not misfit:
            break
        passed_over.append(f"no {strategy.value}: {misfit}")
    reason = "; ".join([f"{strategy.value} after {happened}", *passed_over])
    participants = roster.present() if strategy is Strategy.EXIT else roster.healthy()
    plan = Plan(
        strategy=strategy,
        reason=reason,
        faulty=roster.faulty(),
        participants=tuple(state.rank for state in participants if not state.unfit),
    )
    return plan, reason


def root_causes(faults: Sequence[Fault]) -> list[Fault]:
    """Faults without those that only follow from another: what peers of a dead rank report is not worth a word."""
    primary = [fault for fault in faults if fault.kind not in SECONDARY]
    return primary or list(faults)


def summary(faults: Sequence[Fault]) -> str:
    """The faults in words, those that many ranks share told once."""
    ranks: dict[tuple[FaultKind, str], list[int]] = {}
    for fault in faults:
        members = ranks.setdefault((fault.kind, fault.detail), [])
        if fault.rank is not None and fault.rank not in members:
            members.append(fault.rank)
    return "; ".join(
        f"{named(sorted(who)) if who else 'the job'}: {kind.value}" + (f" ({detail})" if detail else "")
        for (kind, detail), who in ranks.items()
    )


def by_cause(faults: Sequence[Fault]) -> list[Fault]:
    """Faults with those that only follow from another at the end; else in the order in which they were reported."""
    return sorted(faults, key=lambda fault: fault.kind in SECONDARY)


def _offered(roster: Roster, strategy: Strategy) -> bool:
    if strategy is Strategy.EXIT:
        return True
    healthy = roster.healthy()
    # With nobody left the rules say why; before set-up nobody has offered anything.
    if not healthy:
        return strategy is Strategy.DUMP
    return all(state.ready is not None and strategy in state.ready.strategies for state in healthy)


def nothing_to_save(roster: Roster, target: int) -> str:
    """Why a checkpoint of the target would hold nothing new; empty when it would."""
    start = max((state.ready.start_step for state in roster.healthy() if state.ready), default=0)
    if target > start:
        return ""
    return f"no step was completed since the job started at step {start}, so there is nothing to save"


def blamed_for_dump(failures: Sequence[Failed], participants: Collection[int]) -> list[Failed]:
    """Whose failures ended a dump, when no rank was lost: those ranks are left out of the next one.

    A dump is collective, so one rank's full disk can fail it everywhere. When everybody failed and nobody knows better,
    the first to say so is blamed.
    """
    own = [failure for failure in failures if not failure.collateral] or list(failures)
    return own[:1] if len(own) >= len(participants) else own


def restart_needed(fault: Fault, needed: Collection[int], strategy: Strategy, *, stopping: bool) -> bool:
    """Does a fault during a recovery call for a new attempt?

    Args:
        needed: ranks without which the current phase cannot be completed.
    """
    if fault.kind in LOSING:
        return fault.rank in needed
    # While they stop, ranks report what the fault did to them; the decision is looked at again after STOP. And a rank
    # that still answers does not keep the others from saving.
    return not stopping and strategy not in (Strategy.DUMP, Strategy.EXIT)
