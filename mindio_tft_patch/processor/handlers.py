"""The contract of an adaptor: one method per phase, run on the rank's main thread (stop: on the control thread).

An adaptor implements `Handlers`; `processor.guard` calls it. A method returns normally when its phase is done and
raises `RecoveryError` (or anything else) when it is not; the controller then takes the next strategy of the ladder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mindio_tft_patch.protocol.messages import CommitState, Plan, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy


@dataclass(frozen=True)
class Outcome:
    """What a phase has to report.

    detail: free text, e.g. the path of the checkpoint that was written.
    bytes_moved: bytes sent, received or written by this rank.
    """

    detail: str = ""
    bytes_moved: int = 0


class Handlers(Protocol):
    """What a framework adaptor provides."""

    def replica_sets(self) -> tuple[ReplicaSet, ...]:
        """Replica sets that this rank belongs to."""
        ...

    def strategies(self) -> tuple[Strategy, ...]:
        """Strategies that this rank can carry out beyond exit."""
        ...

    def commit_state(self) -> CommitState | None:
        """How far the optimizer state of this rank is; called from any thread. None: no state that can be used."""
        ...

    def stop(self) -> None:
        """Make the main thread leave blocked collectives. Runs on the control thread; must return at once."""
        ...

    def arrived(self) -> None:
        """The main thread has come to the guard because of one stop()."""
        ...

    def clean(self, plan: Plan) -> Outcome:
        """Drop pending handles and caches; finish the local update of `plan.target_step` when it is at the gate."""
        ...

    def rebuild(self, plan: Plan) -> Outcome:
        """Make the communication between `plan.participants` (and returned ranks) work again, in place."""
        ...

    def repair(self, plan: Plan) -> Outcome:
        """Send or receive the state of `plan.faulty` ranks, from `plan.sources`."""
        ...

    def rollback(self, plan: Plan) -> Outcome:
        """Bring everything that is not optimizer state to `plan.target_step`."""
        ...

    def resume(self, plan: Plan) -> Outcome:
        """Last preparations before train() is entered again."""
        ...

    def dump(self, plan: Plan) -> Outcome:
        """Write the checkpoint of `plan.target_step`, together with the other participants; detail: its path."""
        ...

    def pause(self, plan: Plan) -> Outcome:
        """Between two steps: wait until the device and the network have nothing left to do. `Guard.boundary` holds."""
        ...
