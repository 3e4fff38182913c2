"""Which step is kept, and who speaks for it: pure functions of the answers to STOP, `-> (result, reason in words)`.

Two questions look at the ranks differently. What is *saved* may come from every healthy rank, also from one that is
suspect when nobody else holds it: its copy is better than none. What others are *refilled from* comes from trusted
ranks only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mindio_tft_patch.controller.roster import Fault, RankState, Roster, named
from mindio_tft_patch.protocol.messages import Plan, ReplicaSet, ShardSource
from mindio_tft_patch.protocol.phases import FaultKind, Strategy

IN_PLACE = (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD)


def retriable(fault: Fault) -> bool:
    """Can computing the step again, in the same processes, cure it?"""
    if fault.kind is FaultKind.HANG:
        return fault.rank is None  # nobody is to blame: a message was lost
    return fault.kind in (FaultKind.MEMORY, FaultKind.NETWORK, FaultKind.COLLATERAL)


def mark_unusable(roster: Roster) -> None:
    """After STOP: a rank that had a fault of its own inside the local update has a half-done state."""
    for state in roster.healthy():
        commit, faults = state.commit, roster.own_faults(state.rank)
        if commit is not None and commit.updating is not None and faults:
            state.unusable = f"its fault lies inside the optimizer update of step {commit.updating}"
            if all(map(retriable, faults)):
                state.suspect = state.unusable


def choose_target(roster: Roster, strategy: Strategy = Strategy.DUMP) -> tuple[int | None, str]:
    """The step that all state has after the recovery; None when no step is covered. Called after STOP.

    S is the smallest completed step. When any rank has passed the gate for S+1, so has every rank (the gate is a
    barrier) and every rank can complete it: the target is S+1, and a completed step is not lost. When that is not
    covered, S is tried; states of different steps are never mixed.
    """
    agreed = agreed_step(roster) if strategy is Strategy.DUMP else None
    if agreed is not None:
        return agreed, f"step {agreed} is the last one on which the holders of every shard agreed"
    commits = {state.rank: state.commit for state in _speakers(roster, strategy) if state.commit is not None}
    if not commits:
        return None, "no rank answered with a usable state"
    lowest = min(commit.step for commit in commits.values())
    # The next step is lowest + 1 unless the framework left iterations out (bad data, --iterations-to-skip).
    ahead = {rank: commit.updating or commit.step for rank, commit in commits.items()}
    highest = max(ahead.values())
    if highest == lowest:
        reason = f"step {lowest} is the last completed one"
        sources, trouble = choose_sources(roster, lowest, strategy)
        return (lowest, reason) if sources is not None else (None, trouble)
    passed = [rank for rank, step in ahead.items() if step == highest]
    sources, trouble = choose_sources(roster, highest, strategy)
    if sources is not None:
        return highest, f"step {highest}: {named(passed)} has passed the gate for it, so all complete it"
    if choose_sources(roster, lowest, strategy)[0] is not None:
        return lowest, f"step {lowest}, since step {highest} is not covered: {trouble}"
    return None, trouble


def agreed_step(roster: Roster) -> int | None:
    """Last step on which the holders of every shard agreed; None: nobody has found that they disagree."""
    steps = [fault.step or 0 for fault in roster.faults if fault.kind is FaultKind.CORRUPTION]
    return min(steps, default=None)


def reaches(state: RankState, target: int) -> bool:
    """True when the rank's state is at the target or will be after CLEAN. Called after STOP."""
    commit = state.commit
    if not state.healthy or commit is None:
        return False
    if commit.step == target:
        return commit.updating is None
    return target in (commit.at_gate, commit.updating)


def choose_sources(
    roster: Roster, target: int, strategy: Strategy = Strategy.DUMP
) -> tuple[tuple[ShardSource, ...] | None, str]:
    """The rank that speaks for each replica set at the target; None when a set has nobody. Called after STOP."""
    in_place = strategy in IN_PLACE
    corrupted = not in_place and agreed_step(roster) is not None

    def usable(state: RankState) -> bool:
        if in_place:
            return state.trusted and reaches(state, target)
        # A step of long ago is no rank's present state: the adaptor knows where it has kept it.
        return not state.unfit and (state.healthy if corrupted else reaches(state, target))

    def trouble(state: RankState) -> str:
        return state.trouble or f"is at step {state.commit.step if state.commit else '?'}, not {target}"

    return _cover(roster, usable, trouble)


def out_of_reach(roster: Roster, strategy: Strategy) -> str:
    """Why there is no target for a strategy that fits otherwise; empty when there is. Called after STOP."""
    if strategy in (Strategy.EXIT, Strategy.RELOAD):
        return ""
    target, reason = choose_target(roster, strategy)
    if target is None:
        return reason
    nothing = nothing_to_save(roster, target) if strategy is Strategy.DUMP else ""
    return nothing or ("" if choose_sources(roster, target, strategy)[0] is not None else reason)


def aim(plan: Plan, roster: Roster) -> tuple[Plan | None, str]:
    """Add what the answers to STOP have shown: target, sources, and who can take part.

    Returns:
        The plan, or None and why the strategy does not fit after all.
    """
    if plan.strategy in (Strategy.EXIT, Strategy.RELOAD):
        return plan, ""
    target, reason = choose_target(roster, plan.strategy)
    nothing = nothing_to_save(roster, target) if target is not None and plan.strategy is Strategy.DUMP else ""
    sources, trouble = (None, reason) if target is None else choose_sources(roster, target, plan.strategy)
    if target is None or sources is None or nothing:
        return None, nothing or trouble
    participants, faulty = plan.participants, plan.faulty
    if plan.strategy is not Strategy.DUMP:
        faulty = tuple(sorted({*faulty, *_suspect_strays(roster, plan, target)}))
    elif agreed_step(roster) is None:
        participants = tuple(rank for rank in participants if reaches(roster.ranks[rank], target))
        if all(roster.ranks[source.source].trusted for source in sources):
            # What suspect memory holds must not get into a checkpoint that can be written without it.
            participants = tuple(rank for rank in participants if roster.ranks[rank].trusted)
    aimed = msgspec.structs.replace(
        plan,
        reason=f"{plan.reason}; {reason}",
        target_step=target,
        participants=participants,
        faulty=faulty,
        sources=sources,
    )
    return aimed, ""


def _suspect_strays(roster: Roster, plan: Plan, target: int) -> list[int]:
    """Ranks that are all right but cannot come to the target: in place they are refilled from one that can."""
    states = [roster.ranks[rank] for rank in plan.participants]
    strays = [state for state in states if state.trusted and not reaches(state, target)]
    for state in strays:
        state.suspect = f"is at step {state.commit.step if state.commit else '?'}, not {target}"
    return [state.rank for state in strays]


def coverage(roster: Roster, strategy: Strategy) -> str:
    """Why the ranks together do not hold everything, before it is known how far they are; empty when they do."""
    if strategy in IN_PLACE:
        sources, trouble = _cover(roster, lambda state: state.trusted, lambda state: state.trouble)
    else:
        sources, trouble = _cover(roster, lambda state: state.healthy and not state.unfit, lambda state: state.trouble)
    return "" if sources is not None else trouble


def saves_everything(roster: Roster) -> bool:
    """Would a checkpoint cost no completed step, and hold copies only that nobody doubts?

    Not in a job without second copies: its user has chosen to go back to a checkpoint instead.
    """
    copied = all(len(replica_set.ranks) > 1 for replica_set in roster.replica_sets())
    if not copied or coverage(roster, Strategy.RESPAWN):
        return False
    healthy = roster.healthy()
    if all(state.commit is not None for state in healthy):
        return not out_of_reach(roster, Strategy.DUMP)
    # Before STOP. A last step that nobody has spoken of yet is known after it, and then the question is asked again.
    return not nothing_to_save(roster, roster.completed())


def nothing_to_save(roster: Roster, target: int) -> str:
    """Why a checkpoint of the target would hold nothing new; empty when it would."""
    start = max((state.ready.start_step for state in roster.healthy() if state.ready), default=0)
    if target > start:
        return ""
    if agreed_step(roster) is not None:
        return f"the holders have not agreed on any step since the job started at step {start}"
    return f"no step was completed since the job started at step {start}, so there is nothing to save"


def _speakers(roster: Roster, strategy: Strategy) -> list[RankState]:
    healthy = roster.healthy()
    return [state for state in healthy if state.trusted] if strategy in IN_PLACE else healthy


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
