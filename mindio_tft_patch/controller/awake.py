"""The controller's own clock: time in which it did not run itself does not count.

A process that was stopped (SIGSTOP, a machine that sleeps, a virtual machine that moves) finds at its first look that
nobody has been heard of for long and that every deadline has passed. Nobody but itself was silent.
"""

from __future__ import annotations

_LEAST_GAP_SECONDS = 0.25  # several ticks: less is a busy machine


class AwakeClock:
    """Monotonic seconds, less those that were slept through.

    Args:
        heartbeat_seconds: of the ranks; a controller that runs looks at its clock more often.
    """

    def __init__(self, heartbeat_seconds: float) -> None:
        self._gap = max(heartbeat_seconds, _LEAST_GAP_SECONDS)
        # Not nothing, or a controller that is always late would never see time pass; and less than the two heartbeats
        # after which a rank may count as silent, since one may have gone by before.
        self._counted = heartbeat_seconds / 2
        self._looked_at: float | None = None
        self._slept = 0.0

    def at(self, now: float) -> float:
        """Seconds on this clock.

        Args:
            now: monotonic seconds, never less than at the last look.
        """
        gap = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if gap > self._gap:
            self._slept += gap - self._counted
        return now - self._slept
