"""An attempt was given up: what follows for the ranks, and for the strategies that may still be tried. No I/O."""

from __future__ import annotations

from mindio_tft_patch.controller import decide
from mindio_tft_patch.controller.recovery import Recovery, Walk
from mindio_tft_patch.controller.roster import Roster
from mindio_tft_patch.protocol.messages import Failed
from mindio_tft_patch.protocol.phases import Phase, Strategy

_DUMP_RETRIES = 1


def why(failure: Failed) -> str:
    """A failure in words."""
    return f"{failure.phase.value} failed on rank {failure.rank}: {failure.reason}"


def judge(recovery: Recovery, walk: Walk, roster: Roster) -> None:
    """Note what the attempt has shown."""
    _judge_state(recovery, walk, roster)
    if walk.phase in (Phase.STOP, Phase.CLEAN):
        _judge_local(recovery, walk, roster)
        return
    if walk.lost or not walk.failures:
        return
    if walk.phase is not Phase.DUMP:
        blamed = [failure for failure in walk.failures if not failure.collateral] or walk.failures
        recovery.excluded[walk.plan.strategy] = why(blamed[0])
        return
    blamed = decide.blamed_for_dump(walk.failures, walk.plan.participants)
    for failure in blamed:
        roster.ranks[failure.rank].unfit = why(failure)
    recovery.failed_dumps += 1
    if recovery.failed_dumps > _DUMP_RETRIES:
        recovery.excluded[Strategy.DUMP] = why(blamed[0])


def _judge_local(recovery: Recovery, walk: Walk, roster: Roster) -> None:
    """STOP and CLEAN are local work: no other rank can be the cause of a failure in them."""
    for failure in walk.failures:
        state = roster.ranks[failure.rank]
        state.unusable, state.suspect = why(failure), ""
        if walk.plan.strategy is Strategy.RELOAD:  # which takes everybody: it would only fail again
            recovery.excluded[Strategy.RELOAD] = why(failure)


def _judge_state(recovery: Recovery, walk: Walk, roster: Roster) -> None:
    """What an unfinished phase has left behind."""
    if walk.phase is Phase.REPAIR:
        unfinished = walk.waiting | {failure.rank for failure in walk.failures}
        for rank in unfinished.intersection(walk.plan.faulty):
            state = roster.ranks[rank]
            if state.present and not state.returning:
                state.unusable = "its refill from a replica was not completed"
                state.suspect = state.suspect or state.unusable
    if walk.plan.strategy is Strategy.RELOAD and walk.phase in (Phase.ROLLBACK, Phase.RESUME):
        for strategy in (Strategy.RETRY, Strategy.RESPAWN, Strategy.DUMP):
            recovery.excluded[strategy] = "the ranks had begun to load the last checkpoint"
