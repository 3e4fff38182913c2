"""What this node has to do with recoveries in place: which ranks to start anew, and when. Rules only.

The controller's plan names the ranks to be started in every phase of an attempt, so that an agent that misses one
command hears it from the next. A process is therefore replaced only by an attempt that is younger than itself: the
ranks of a launcher that has itself come back, for one, stand in the plan of the attempt that waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mindio_tft_patch.launch.vigil import ENDING
from mindio_tft_patch.protocol.messages import Do
from mindio_tft_patch.protocol.phases import Phase, Strategy


class InPlace:
    """Recoveries in place, as one launcher sees them between a start of all its ranks and their end.

    Args:
        ranks: global ranks of this node.
        attempt: number of the controller's recovery when their processes were started.
        counts: finished recoveries by strategy; added to.

    Attributes:
        recovering: a recovery is going on, which nothing should slow down.
    """

    def __init__(self, ranks: Iterable[int], attempt: int, counts: Counter[Strategy]) -> None:
        self.recovering = False
        self._born = dict.fromkeys(ranks, attempt)
        self._counts = counts
        self._counted = attempt

    def take(self, do: Do) -> tuple[int, ...]:
        """A command has come.

        Returns:
            Ranks of this node whose processes are to be replaced now.
        """
        if do.plan.strategy in ENDING:
            return ()
        self.recovering = do.phase is not Phase.RESUME
        if do.phase is Phase.RESUME and do.attempt > self._counted:
            self._counted = do.attempt
            self._counts[do.plan.strategy] += 1
        lost = tuple(rank for rank in do.plan.lost if self._born.get(rank, do.attempt) < do.attempt)
        self._born.update(dict.fromkeys(lost, do.attempt))
        return lost
