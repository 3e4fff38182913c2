"""How long a phase may take, and how long a rank may be silent in it: pure functions. Seconds."""

from __future__ import annotations

from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.recovery import Recovery, Walk
from mindio_tft_patch.controller.roster import Fault, Roster
from mindio_tft_patch.controller.targets import IN_PLACE
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

# Shares of the time that the launcher leaves (TTP_OT). STOP may have to wait for a save or a data loader to return,
# and there must be time for the dump, and for the EXIT that tells its path.
_STOP_SHARE, _CLEAN_SHARE, _DUMP_SHARE = 0.4, 0.4, 0.95
_EXIT_STOP_SHARE = 0.05  # nothing is to be saved: no reason to wait long
_SILENT_SHARE = 0.25  # of a phase: a participant without heartbeat for so long will not answer


def allowed(options: Options, recovery: Recovery, walk: Walk, now: float) -> float:
    """Seconds for the current phase."""
    limit = options.phase_timeout_seconds
    if recovery.dump_deadline is None or walk.asking:
        return limit
    left = max(0.0, recovery.dump_deadline - now)
    if walk.plan.strategy is Strategy.EXIT:
        return min(limit, _EXIT_STOP_SHARE * options.dump_timeout_seconds)
    if walk.phase is Phase.DUMP:
        return _DUMP_SHARE * left  # a large model may take longer than a phase: TTP_OT is for that
    return min(limit, (_STOP_SHARE if walk.phase is Phase.STOP else _CLEAN_SHARE) * left)


def silent(roster: Roster, walk: Walk, now: float) -> list[Fault]:
    """Who gives no sign of life for so long that it will not answer; in place everybody is needed to the end."""
    ranks = set(walk.waiting)
    if walk.plan.strategy in IN_PLACE:
        ranks |= {rank for rank in (*walk.plan.participants, *walk.plan.faulty) if roster.ranks[rank].present}
    held = walk.holding or walk.consulting
    span = roster.options.phase_timeout_seconds if held else walk.deadline - walk.began
    found: list[Fault] = []
    for rank in sorted(ranks):
        quiet = roster.ranks[rank].silent_for(now)
        if quiet >= _patience(roster, rank, span, now):
            found.append(Fault(rank, FaultKind.HANG, f"no sign of life for {quiet:.1f} s in {walk.phase.value}"))
    return found


def _patience(roster: Roster, rank: int, span: float, now: float) -> float:
    """Seconds of silence after which a rank will not answer any more."""
    least = 2 * roster.options.silence_seconds
    if not roster.watched(rank, now):
        return least  # nobody will report its death, and torchrun leaves the survivors 30 s in all
    return max(least, _SILENT_SHARE * span)
