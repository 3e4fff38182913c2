"""The ladder: which strategy fits what is known, as a pure function `(roster, faults, now) -> (plan, reason)`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from mindio_tft_patch.controller import targets
from mindio_tft_patch.controller.roster import Fault, RankState, Roster, named
from mindio_tft_patch.controller.targets import IN_PLACE
from mindio_tft_patch.controller.watch import SECONDARY
from mindio_tft_patch.protocol.messages import Failed, Plan
from mindio_tft_patch.protocol.phases import LADDER, FaultKind, Strategy

# The other end of a connection, as gloo names it: [10.0.0.7]:34567.
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:\d+")

# Kinds that would happen again, that ask the job to end, or of which nobody knows who is right: only saving helps.
_FINAL = frozenset({FaultKind.TERMINATED, FaultKind.EXCEPTION, FaultKind.CORRUPTION})
# Those of them that are no longer of interest when the cluster manager ends the process and starts another one.
_ENDED_WITH_THE_PROCESS = frozenset({FaultKind.TERMINATED, FaultKind.EXCEPTION})

_NOBODY_STARTS = "without ttprun nobody starts a lost process anew"


@dataclass(frozen=True)
class Situation:
    """What a rule of the ladder looks at.

    excluded: strategies that failed in this recovery or are used up, with the reason.
    managed: a cluster manager starts processes anew, where no agent does.
    may_save: a dump may be chosen, too.
    """

    roster: Roster
    faults: Sequence[Fault]
    now: float
    excluded: Mapping[Strategy, str]
    managed: bool = False
    may_save: bool = True

    @property
    def final(self) -> str:
        """Kinds of fault that no recovery in place cures, in words; empty when there is none."""
        declared = {fault.rank for fault in self.faults if fault.kind is FaultKind.DECLARED}
        kinds = {
            fault.kind
            for fault in self.faults
            if fault.kind in _FINAL
            and not fault.losing
            and not (fault.kind in _ENDED_WITH_THE_PROCESS and fault.rank in declared)
        }
        return ", ".join(sorted(kind.value for kind in kinds))

    @property
    def gone(self) -> list[int]:
        """Ranks that have left training in good order."""
        return [state.rank for state in self.roster.ranks.values() if state.finished]

    @property
    def starts_anew(self) -> bool:
        """Is there, or was there, anybody who could start a rank anew?"""
        return self.managed or bool(self.roster.agents)

    def watched(self, rank: int) -> bool:
        """Can an agent that is alive start the rank anew?"""
        return self.roster.watched(rank, self.now)

    def to_restart(self, strategy: Strategy) -> list[RankState]:
        """Ranks that need a new process, or wait for the one that has been ordered, ascending.

        Suspects are refilled where they are, unless that has failed or nothing else is left to be done.
        """
        states = self.roster.ranks.values()
        found = [state for state in states if state.lost is not None or (state.returning and state.unusable)]
        if strategy is Strategy.RESPAWN:
            found += [s for s in states if s.present and s.unusable and not s.suspect and not s.returning]
            others = found or [state for state in states if state.returning]
            if Strategy.RETRY in self.excluded or not others:
                found += [state for state in states if state.present and state.suspect and not state.returning]
        return sorted(found, key=lambda state: state.rank)


def _misfit_retry(situation: Situation) -> str:
    others = {fault.kind.value for fault in situation.faults if not targets.retriable(fault)}
    if others:
        return f"{', '.join(sorted(others))} is not cured by computing again"
    unusable = [s for s in situation.roster.ranks.values() if s.trained and not s.mendable]
    if unusable:
        return f"rank {unusable[0].rank} {_cannot(unusable[0])}"
    return _misfit_in_place(situation) or targets.coverage(situation.roster, Strategy.RETRY)


def _cannot(state: RankState) -> str:
    return "has left training" if state.finished else f"cannot take part ({state.trouble})"


def _misfit_respawn(situation: Situation) -> str:
    if situation.final:
        # A launcher of somebody else ends all ranks when it has lost one, and that is what they report.
        ended = any(fault.kind is FaultKind.TERMINATED for fault in situation.faults)
        nobody = f", and {_NOBODY_STARTS}" if ended and not situation.starts_anew else ""
        return f"{situation.final} is not cured by a new process{nobody}"
    back = [state for state in situation.roster.ranks.values() if state.returning]
    connects_anew = Strategy.RETRY not in situation.excluded and all(map(targets.retriable, situation.faults))
    if not situation.to_restart(Strategy.RESPAWN) and not back and not connects_anew:
        return "no rank needs a new process"
    return (
        _misfit_in_place(situation)
        or _misfit_restart(situation, Strategy.RESPAWN)
        or targets.coverage(situation.roster, Strategy.RESPAWN)
    )


def _misfit_reload(situation: Situation) -> str:
    if situation.final:
        return f"{situation.final} is not cured by loading a checkpoint"
    return (
        _misfit_in_place(situation)
        or _no_checkpoint(situation)
        or _restarts_nothing(situation)
        or _misfit_restart(situation, Strategy.RELOAD)
        or _dump_costs_less(situation)
    )


def _no_checkpoint(situation: Situation) -> str:
    """Whoever leads the saves knows whether there is anything to load; what it said counts also when it is lost."""
    words = [state.last_word for state in situation.roster.ranks.values()]
    return next((word.no_checkpoint for word in words if word is not None and word.no_checkpoint), "")


def _dump_costs_less(situation: Situation) -> str:
    """As long as every shard has a copy that can be saved, no completed step is given up to keep the job running."""
    saves = (
        situation.may_save
        and Strategy.DUMP not in situation.excluded
        and offered(situation.roster, Strategy.DUMP)
        and not _misfit_dump(situation)
        and targets.saves_everything(situation.roster)
    )
    return "copies of all shards are left, and a checkpoint of the last step costs none" if saves else ""


def _restarts_nothing(situation: Situation) -> str:
    """A job may allow reloads and no new processes: it loads only while every process is there."""
    roster = situation.roster
    words = [state.last_word for state in roster.ranks.values()]
    if roster.options.restarts and all(word is None or word.restarts for word in words):
        return ""
    lost = [state.rank for state in situation.to_restart(Strategy.RELOAD)]
    # The cluster manager has one word for everything that it starts new processes for.
    concerned = lost or ([state.rank for state in roster.ranks.values()] if situation.managed else [])
    return f"{named(concerned)} would need a new process, and this job starts none" if concerned else ""


def _misfit_in_place(situation: Situation) -> str:
    """Every rank is needed, and each must have something to go on from."""
    return f"{named(situation.gone)} has left training" if situation.gone else _unready(situation)


def _misfit_restart(situation: Situation, strategy: Strategy) -> str:
    """The agent of its node starts a process anew; when the whole node is gone, somebody may start that again."""
    helpless = [
        state.rank
        for state in situation.to_restart(strategy)
        if not state.awaited and not situation.watched(state.rank) and not _may_come(situation, state)
    ]
    nobody = "" if situation.starts_anew else f" ({_NOBODY_STARTS})"
    return f"no agent can restart {named(helpless)}{nobody}" if helpless else ""


def _may_come(situation: Situation, state: RankState) -> bool:
    if situation.managed:
        return situation.roster.options.return_seconds > 0
    known = situation.roster.launcher_of(state.rank) is not None
    return known and state.lost is not None and situation.roster.options.return_seconds > 0


def _misfit_dump(situation: Situation) -> str:
    misfit = _unready(situation) or targets.coverage(situation.roster, Strategy.DUMP)
    if misfit and situation.gone:  # which they do after the final save
        gone = named(situation.gone)
        return f"training was over: {gone} had left it in good order, so that nothing was left to be saved"
    return misfit


def _unready(situation: Situation) -> str:
    unready = [rank for rank, state in situation.roster.ranks.items() if not state.trained]
    return f"{named(unready)} did not finish the set-up, so there is no trained state to keep" if unready else ""


_MISFITS: dict[Strategy, Callable[[Situation], str]] = {
    Strategy.RETRY: _misfit_retry,
    Strategy.RESPAWN: _misfit_respawn,
    Strategy.RELOAD: _misfit_reload,
    Strategy.DUMP: _misfit_dump,
    Strategy.EXIT: lambda situation: "",
}


def choose_strategy(
    roster: Roster,
    faults: Sequence[Fault],
    now: float,
    *,
    excluded: Mapping[Strategy, str],
    among: Collection[Strategy] = LADDER,
    managed: bool = False,
) -> tuple[Plan, str]:
    """The first strategy of the ladder that every healthy rank offers, that has not failed, and that fits the faults.

    Args:
        excluded: strategies that failed in this recovery or are used up, with the reason.
        among: what may be chosen; EXIT is, whatever stands here, when nothing else fits.
        managed: a cluster manager starts processes anew, where no agent does.

    Returns:
        A plan without target and sources (those need the answers to STOP), and the reason, which names the faults and
        why the rungs above do not fit.
    """
    situation = Situation(roster, faults, now, excluded, managed, may_save=Strategy.DUMP in among)
    passed_over: list[str] = []
    for strategy in LADDER:
        if strategy is not Strategy.EXIT and strategy not in among:
            continue
        if not offered(roster, strategy):
            continue  # not switched on by the user's flags: not worth a word in every reason
        misfit = excluded.get(strategy) or _MISFITS[strategy](situation)
        if not misfit:
            break
        passed_over.append(f"no {strategy.value}: {misfit}")
    words = [f"{strategy.value} after {summary(root_causes(faults))}", *passed_over, _waiting_for(situation, strategy)]
    plan = _plan(situation, strategy, "; ".join(filter(None, words)))
    return plan, plan.reason


def _plan(situation: Situation, strategy: Strategy, reason: str) -> Plan:
    roster = situation.roster
    restarted = situation.to_restart(strategy) if strategy in IN_PLACE else []
    begun = {state.rank for state in restarted}
    faulty = set(roster.faulty(suspects=strategy in (Strategy.RETRY, Strategy.RESPAWN)))
    if strategy is Strategy.RELOAD:
        # What the others hold is replaced as a whole; only who comes back is anything special.
        faulty = {state.rank for state in roster.ranks.values() if state.lost is not None or state.returning}
    return Plan(
        strategy=strategy,
        reason=reason,
        faulty=tuple(sorted(faulty | begun)),
        lost=tuple(s.rank for s in restarted if not s.awaited and situation.watched(s.rank)),
        participants=tuple(state.rank for state in _participants(roster, strategy) if state.rank not in begun),
    )


def _participants(roster: Roster, strategy: Strategy) -> list[RankState]:
    states = roster.ranks.values()
    if strategy is Strategy.EXIT:
        return [state for state in states if state.present and not state.unfit]
    if strategy is Strategy.DUMP:
        return [state for state in states if state.healthy and not state.unfit]
    if strategy is Strategy.RELOAD:
        return [state for state in states if state.back and not state.returning]
    return [state for state in states if state.mendable]


def _waiting_for(situation: Situation, strategy: Strategy) -> str:
    """Which nodes are waited for as a whole, in words; empty when none is."""
    if strategy not in IN_PLACE:
        return ""
    roster = situation.roster
    ranks = [s.rank for s in situation.to_restart(strategy) if not s.awaited and not situation.watched(s.rank)]
    if situation.managed and ranks:
        return (
            f"waiting up to {roster.options.return_seconds:.0f} s for the cluster manager to start {named(ranks)} anew"
        )
    nodes = sorted({str(roster.launcher_of(rank)) for rank in ranks})
    if not nodes:
        return ""
    which = f"node {nodes[0]}" if len(nodes) == 1 else f"nodes {', '.join(nodes)}"
    return f"waiting up to {roster.options.return_seconds:.0f} s for the launcher of {which} to be started again"


def root_causes(faults: Sequence[Fault]) -> list[Fault]:
    """Faults without those that only follow from another: what peers of a dead rank report is not worth a word."""
    primary = [fault for fault in faults if fault.kind not in SECONDARY]
    return primary or list(faults)


def summary(faults: Sequence[Fault]) -> str:
    """The faults in words, those that many ranks share told once.

    Who only suffers is not named as if it was to blame: it has seen that a connection broke, not at which end.
    """
    broken = [fault for fault in faults if fault.kind is FaultKind.COLLATERAL and fault.rank is not None]
    ranks: dict[tuple[FaultKind, str], list[int]] = {}
    for fault in faults:
        if fault in broken:
            continue
        members = ranks.setdefault((fault.kind, fault.detail), [])
        if fault.rank is not None and fault.rank not in members:
            members.append(fault.rank)
    told = [
        f"{named(sorted(who)) if who else 'the job'}: {kind.value}" + (f" ({detail})" if detail else "")
        for (kind, detail), who in ranks.items()
    ]
    return "; ".join([*told, *([_broken_connections(broken)] if broken else [])])


def _broken_connections(seen: Sequence[Fault]) -> str:
    """What the ranks that suffer have seen; the host that most of them name, where that says anything."""
    ranks = {fault.rank for fault in seen if fault.rank is not None}
    hosts = Counter(host for fault in seen for host in set(_ADDRESS.findall(fault.detail)))
    host, times = hosts.most_common(1)[0] if hosts else ("", 0)
    blames = len(hosts) > 1 and 2 * times > len(seen)
    at = f", most of which name the host {host}" if blames else ""
    detail = f": {seen[0].detail}" if seen[0].detail else ""
    return f"connections between ranks broke, which rank is to blame is not known (seen by {named(ranks)}{at}{detail})"


def by_cause(faults: Sequence[Fault]) -> list[Fault]:
    """Faults with those that only follow from another at the end; else in the order in which they were reported."""
    return sorted(faults, key=lambda fault: fault.kind in SECONDARY)


def offered(roster: Roster, strategy: Strategy) -> bool:
    """Does every rank that would have a part in the strategy offer it?"""
    if strategy is Strategy.EXIT:
        return True
    if strategy is Strategy.RESPAWN and not roster.options.restarts:
        return False
    states = [state for state in roster.ranks.values() if (state.back if strategy in IN_PLACE else state.healthy)]
    if not states and strategy in IN_PLACE:
        # All are lost: what they had offered counts, since whoever comes back runs the same command.
        words = [state.last_word for state in roster.ranks.values()]
        return all(word is not None and strategy in word.strategies for word in words)
    # With nobody left the rules say why; before set-up nobody has offered anything.
    if not states:
        return strategy is Strategy.DUMP
    return all(state.ready is not None and strategy in state.ready.strategies for state in states)


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
    if fault.losing:
        return fault.rank in needed
    # While they stop, ranks report what the fault did to them; the decision is looked at again after STOP. And a rank
    # that still answers does not keep the others from saving.
    return not stopping and strategy not in (Strategy.DUMP, Strategy.EXIT)
