"""What is known of every rank and agent: what they said, and when they were last heard of. No decisions here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.protocol.messages import (
    PROTOCOL_VERSION,
    CommitState,
    Progress,
    Ready,
    Register,
    ReplicaSet,
    Role,
)
from mindio_tft_patch.protocol.phases import Activity, FaultKind

# The process is gone, or may be alive but is not to be waited for.
LOSING = frozenset({FaultKind.PROCESS_DEATH, FaultKind.HEARTBEAT_LOST, FaultKind.HANG, FaultKind.DECLARED})
# Long work that is no hang while the rank gives signs of life.
LONG_WORK = frozenset(
    {Activity.SETUP, Activity.EVALUATE, Activity.SAVE, Activity.RECOVERY, Activity.PAUSE, Activity.FINISHED}
)


@dataclass(frozen=True)
class Refusal:
    """Why a peer may not register.

    passing: the refusal may end by itself: another process holds the place and was heard of a moment ago.
    """

    reason: str
    passing: bool = False


@dataclass(frozen=True)
class Fault:
    """Something that happened; rank None: to the job as a whole.

    on_return: to a process that was on its way back: a start that failed, which says nothing about training.
    """

    rank: int | None
    kind: FaultKind
    detail: str
    step: int | None = None
    on_return: bool = False

    @property
    def losing(self) -> bool:
        """The process is gone, or is not to be waited for any more."""
        return self.kind in LOSING or (self.on_return and self.kind is not FaultKind.TERMINATED)

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        return f"{who}: {self.kind.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class RankState:
    """One rank.

    Attributes:
        heard_at: when the last message came; None before the first.
        lost: why the process is not to be waited for any more.
        awaited: a process that takes its place has been ordered and, as far as known, lives.
        returning: such a process has registered; until the recovery has succeeded. It holds no state of its own.
        former: what the process before it said in Ready.
        unusable: why its state cannot be used in this recovery.
        suspect: why its state is to be refilled from a replica, though the rank itself can take part.
        unfit: why it cannot write, though its state is good.
        commit: as answered to the phases of this recovery.
    """

    rank: int
    registered: Register | None = None
    ready: Ready | None = None
    progress: Progress | None = None
    heard_at: float | None = None
    finished: bool = False
    lost: Fault | None = None
    awaited: bool = False
    returning: bool = False
    former: Ready | None = None
    unusable: str = ""
    suspect: str = ""
    unfit: str = ""
    commit: CommitState | None = None

    @property
    def dead(self) -> bool:
        """The process has ended."""
        return self.lost is not None and self.lost.kind is FaultKind.PROCESS_DEATH

    @property
    def present(self) -> bool:
        """A process that can be spoken to and is expected to answer."""
        return self.registered is not None and self.lost is None and not self.finished

    @property
    def healthy(self) -> bool:
        """Present, with a state that can be saved."""
        return self.present and self.ready is not None and not self.unusable and not self.returning

    @property
    def trusted(self) -> bool:
        """Healthy, with a state that others can be refilled from."""
        return self.healthy and not self.suspect

    @property
    def mendable(self) -> bool:
        """Takes part in a recovery in place from the beginning: healthy, or suspect and to be refilled."""
        return self.healthy or (self.back and bool(self.suspect) and not self.returning)

    @property
    def back(self) -> bool:
        """Present and ready: its guard can hear commands."""
        return self.present and self.ready is not None

    @property
    def trained(self) -> bool:
        """The rank has been ready, in this process or in one before it."""
        return self.ready is not None or self.former is not None

    @property
    def last_word(self) -> Ready | None:
        """What this process, or the one before it, has said it offers; None: nothing yet."""
        return self.ready or self.former

    @property
    def trouble(self) -> str:
        """Why this rank cannot hand over its state, in words; empty when it can."""
        if self.lost is not None:
            return self.lost.kind.value
        if self.finished:
            return "has left training"
        if self.returning:
            return "has come back without state"
        if self.registered is None or self.ready is None:
            return "had not finished its set-up"
        return self.unusable or self.unfit or self.suspect

    def silent_for(self, now: float) -> float:
        """Seconds since the last message; 0 for a rank that never spoke."""
        return 0.0 if self.heard_at is None else now - self.heard_at


@dataclass
class AgentState:
    """The agent of one node.

    returning: it takes the place of one that is gone; until the recovery has succeeded.
    """

    registered: Register
    heard_at: float
    returning: bool = False


class Roster:
    """All ranks and agents of the job.

    Attributes:
        progress_at: when a rank last completed a step, became ready, or was at long work; None before training.
        faults: of the current recovery.
        attempt: the latest that any peer has heard of, when it registered.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ranks = {rank: RankState(rank) for rank in range(options.world_size)}
        self.agents: dict[int, AgentState] = {}
        self.progress_at: float | None = None
        self.stepped = False
        self.faults: list[Fault] = []
        self.attempt = 0

    def refusal(self, register: Register, now: float, *, same_connection: bool) -> Refusal | None:
        """Why a Register cannot be accepted; None when it can."""
        if register.version != PROTOCOL_VERSION:
            return Refusal(
                f"it speaks version {register.version} of the protocol, the controller version {PROTOCOL_VERSION}; "
                "install the same version of mindio_tft_patch on all nodes"
            )
        if register.world_size != self.options.world_size:
            return Refusal(
                f"its job has {register.world_size} ranks, this one {self.options.world_size}; is it another job?"
            )
        if register.role is Role.AGENT:
            return self._agent_refusal(register, now, same_connection)
        return self._processor_refusal(register, now, same_connection)

    def _processor_refusal(self, register: Register, now: float, same_connection: bool) -> Refusal | None:
        state = self.ranks.get(register.rank)
        if state is None:
            return Refusal(f"rank {register.rank} is not from 0 to {self.options.world_size - 1}")
        known = state.registered
        if known is None or same_connection or same_process(known, register) or state.lost is not None:
            return None
        if state.finished:
            return Refusal(f"rank {register.rank} has left training in good order (process {known.pid})")
        if state.silent_for(now) >= self.options.silence_seconds:
            return None
        return Refusal(f"rank {register.rank} is registered and alive (process {known.pid})", passing=True)

    def _agent_refusal(self, register: Register, now: float, same_connection: bool) -> Refusal | None:
        strays = [rank for rank in register.ranks if rank not in self.ranks]
        if strays:
            return Refusal(f"rank {strays[0]} is not from 0 to {self.options.world_size - 1}")
        known = self.agents.get(register.node)
        if known is None or same_connection or same_process(known.registered, register):
            return None
        if now - known.heard_at >= self.options.silence_seconds:
            return None
        reason = f"node {register.node} has a live agent already (process {known.registered.pid})"
        return Refusal(reason, passing=True)

    def register(self, register: Register, now: float) -> bool:
        """Take in a peer that was not refused; a new process of a rank begins with an empty state.

        It is returning when the process before it was lost, or had been ready.

        Returns:
            False when this process has registered before.
        """
        self.attempt = max(self.attempt, register.attempt)
        if register.role is Role.AGENT:
            before = self.agents.get(register.node)
            if before is not None and same_process(before.registered, register):
                before.heard_at = now
                return False
            known_ranks = any(self.ranks[rank].registered is not None for rank in register.ranks)
            self.agents[register.node] = AgentState(register, now, returning=before is not None and known_ranks)
            return True
        state = self.ranks[register.rank]
        known = state.registered
        if known is not None and not same_process(known, register):
            former = state.ready or state.former
            returning = state.lost is not None or former is not None
            state = self.ranks[register.rank] = RankState(register.rank, returning=returning, former=former)
        state.registered, state.heard_at = register, now
        return known is None or not same_process(known, register)

    def note_progress(self, state: RankState, progress: Progress, now: float) -> None:
        """Take in a heartbeat."""
        before = state.progress
        stepped = before is not None and before.commit.step != progress.commit.step
        if stepped or progress.activity in LONG_WORK or self.progress_at is None:
            self.progress_at = now
        self.stepped = self.stepped or stepped
        state.progress = progress

    def completed(self) -> int:
        """Last step that any rank has spoken of as completed; 0: none."""
        return max((state.progress.commit.step for state in self.ranks.values() if state.progress), default=0)

    def present(self) -> list[RankState]:
        """Ranks that can be spoken to and are expected to answer, ascending."""
        return [state for state in self.ranks.values() if state.present]

    def healthy(self) -> list[RankState]:
        """Ranks whose state can be saved, ascending."""
        return [state for state in self.ranks.values() if state.healthy]

    def faulty(self, *, suspects: bool = False) -> tuple[int, ...]:
        """Ranks that are lost, have come back, or whose state cannot be used; on demand also those that are suspect."""
        return tuple(
            state.rank
            for state in self.ranks.values()
            if state.lost is not None or state.returning or state.unusable or (suspects and state.suspect)
        )

    def replica_sets(self) -> list[ReplicaSet]:
        """All replica sets that any rank has named, in a fixed order."""
        # Also those of processes that are gone: a set whose only member comes back without state is not covered.
        known = [state.last_word for state in self.ranks.values()]
        found = {found for ready in known if ready is not None for found in ready.replica_sets}
        return sorted(found, key=lambda replica_set: (replica_set.name, replica_set.ranks))

    def watched(self, rank: int, now: float) -> bool:
        """True when an agent that is alive will report this rank's death."""
        return any(
            rank in agent.registered.ranks and now - agent.heard_at < self.options.silence_seconds
            for agent in self.agents.values()
        )

    def launcher_of(self, rank: int) -> int | None:
        """Node whose agent has started the rank, whether that agent lives or not; None: no agent has."""
        return next((node for node, agent in self.agents.items() if rank in agent.registered.ranks), None)

    def own_faults(self, rank: int) -> list[Fault]:
        """Faults of this recovery that name the rank."""
        return [fault for fault in self.faults if fault.rank == rank]

    def forget_recovery(self) -> None:
        """A recovery has succeeded: its faults are history."""
        self.faults.clear()
        for state in self.ranks.values():
            if state.returning:
                # Its first step compiles kernels again, and its leap to the target was no step.
                self.stepped, state.progress = False, None
            state.unusable, state.suspect, state.unfit, state.commit = "", "", "", None
            state.awaited = state.returning = False
        for known in self.agents.values():
            known.returning = False


def note(state: RankState, fault: Fault) -> None:
    """What a fault of its own means for a rank."""
    if fault.losing:
        state.lost = fault
        state.awaited = state.returning = False
    elif fault.kind is FaultKind.MEMORY and state.mendable:
        state.suspect = "its memory had a fault"


def same_process(one: Register, other: Register) -> bool:
    """Do both speak for the same process?"""
    return (one.host, one.pid, one.life) == (other.host, other.pid, other.life)


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1, 2"."""
    listed = [str(rank) for rank in sorted(ranks)]
    return ("rank " if len(listed) == 1 else "ranks ") + (", ".join(listed) or "none")
