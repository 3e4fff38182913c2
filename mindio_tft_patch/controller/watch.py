"""Is somebody lost, does the job hang? Pure functions of the roster: `(roster, now) -> (faults, reason in words)`."""

from __future__ import annotations

from collections.abc import Sequence

from mindio_tft_patch.controller.roster import LONG_WORK, Fault, RankState, Roster, named
from mindio_tft_patch.protocol.phases import FaultKind

# A first step compiles kernels and builds caches; with nothing measured yet, a rank that gives signs of life gets more.
FIRST_STEP_FACTOR = 5.0
MEDIAN_STEPS = 10.0

# Reported by ranks that suffer from somebody else's fault: worth a wait for the root cause.
SECONDARY = frozenset({FaultKind.COLLATERAL, FaultKind.NETWORK})


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


def root_cause_seconds(roster: Roster, now: float) -> float:
    """How long to wait for the root cause when only ranks that suffer from it have reported.

    An agent reports a death within moments, but a peer may see the closed connection first; without an agent it takes
    the missed heartbeats. A cause that comes later still begins a new attempt.
    """
    options = roster.options
    if all(roster.watched(rank, now) for rank in roster.ranks):
        return 2 * options.collect_seconds
    return options.collect_seconds + options.silence_seconds + options.heartbeat_seconds


def _named(states: Sequence[RankState]) -> str:
    return named(state.rank for state in states)


def _waits(state: RankState, at_least_seconds: float) -> bool:
    waited = state.progress.in_collective_seconds if state.progress else None
    return waited is not None and waited >= at_least_seconds


def _all_training(states: Sequence[RankState]) -> bool:
    return not any(state.progress and state.progress.activity in LONG_WORK for state in states)
