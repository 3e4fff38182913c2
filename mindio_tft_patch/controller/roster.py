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
LOSING = frozenset({FaultKind.PROCESS_DEATH, FaultKind.HEARTBEAT_LOST, FaultKind.HANG})
# Long work that is no hang while the rank gives signs of life.
LONG_WORK = frozenset({Activity.SETUP, Activity.EVALUATE, Activity.SAVE, Activity.RECOVERY, Activity.FINISHED})


@dataclass(frozen=True)
class Fault:
    """Something that happened; rank None: to the job as a whole."""

    rank: int | None
    kind: FaultKind
    detail: str
    step: int | None = None

    def __str__(self) -> str:
        who = "the job" if self.rank is None else f"rank {self.rank}"
        return f"{who}: {self.kind.value}" + (f" ({self.detail})" if self.detail else "")


@dataclass
class RankState:
    """One rank.

    Attributes:
        heard_at: when the last message came; None before the first.
        lost: why the process is not to be waited for any more.
        unusable: why its state cannot be used in this recovery.
        unfit: why it cannot write, though its state is good.
        commit: as answered to STOP or CLEAN of this recovery.
    """

    rank: int
    registered: Register | None = None
    ready: Ready | None = None
    progress: Progress | None = None
    heard_at: float | None = None
    finished: bool = False
    lost: Fault | None = None
    unusable: str = ""
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
        """Present, with a state that can be recovered from."""
        return self.present and self.ready is not None and not self.unusable

    @property
    def trouble(self) -> str:
        """Why this rank cannot hand over its state, in words; empty when it can."""
        if self.lost is not None:
            return self.lost.kind.value
        if self.finished:
            return "has left training"
        if self.registered is None or self.ready is None:
            return "had not finished its set-up"
        return self.unusable or self.unfit

    def silent_for(self, now: float) -> float:
        """Seconds since the last message; 0 for a rank that never spoke."""
        return 0.0 if self.heard_at is None else now - self.heard_at


@dataclass
class AgentState:
    """The agent of one node."""

    registered: Register
    heard_at: float


class Roster:
    """All ranks and agents of the job.

    Attributes:
        progress_at: when a rank last completed a step, became ready, or was at long work; None before training.
        faults: of the current recovery.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.ranks = {rank: RankState(rank) for rank in range(options.world_size)}
        self.agents: dict[int, AgentState] = {}
        self.progress_at: float | None = None
        self.stepped = False
        self.faults: list[Fault] = []

    def refusal(self, register: Register, now: float, *, same_connection: bool) -> str:
        """Why a Register cannot be accepted; empty when it can."""
        if register.version != PROTOCOL_VERSION:
            return (
                f"it speaks version {register.version} of the protocol, the controller version {PROTOCOL_VERSION}; "
                "install the same version of mindio_tft_patch on all nodes"
            )
        if register.world_size != self.options.world_size:
            return f"its job has {register.world_size} ranks, this one {self.options.world_size}; is it another job?"
        if register.role is Role.AGENT:
            return self._agent_refusal(register, now, same_connection)
        state = self.ranks.get(register.rank)
        if state is None:
            return f"rank {register.rank} is not from 0 to {self.options.world_size - 1}"
        known = state.registered
        if known is None or same_connection or _same_process(known, register) or state.lost is not None:
            return ""
        live = state.silent_for(now) < self.options.silence_seconds
        return f"rank {register.rank} is registered and alive (process {known.pid})" if live else ""

    def _agent_refusal(self, register: Register, now: float, same_connection: bool) -> str:
        strays = [rank for rank in register.ranks if rank not in self.ranks]
        if strays:
            return f"rank {strays[0]} is not from 0 to {self.options.world_size - 1}"
        known = self.agents.get(register.node)
        if known is None or same_connection or _same_process(known.registered, register):
            return ""
        if now - known.heard_at < self.options.silence_seconds:
            return f"node {register.node} has a live agent already (process {known.registered.pid})"
        return ""

    def register(self, register: Register, now: float) -> bool:
        """Take in a peer that was not refused; a new process of a rank begins with an empty state.

        Returns:
            False when this process has registered before.
        """
        if register.role is Role.AGENT:
            before = self.agents.get(register.node)
            self.agents[register.node] = AgentState(register, now)
            return before is None or not _same_process(before.registered, register)
        state = self.ranks[register.rank]
        known = state.registered
        if known is not None and not _same_process(known, register):
            state = self.ranks[register.rank] = RankState(register.rank)
        state.registered, state.heard_at = register, now
        return known is None or not _same_process(known, register)

    def note_progress(self, state: RankState, progress: Progress, now: float) -> None:
        """Take in a heartbeat."""
        before = state.progress
        stepped = before is not None and before.commit.step != progress.commit.step
        if stepped or progress.activity in LONG_WORK or self.progress_at is None:
            self.progress_at = now
        self.stepped = self.stepped or stepped
        state.progress = progress

    def present(self) -> list[RankState]:
        """Ranks that can be spoken to and are expected to answer, ascending."""
        return [state for state in self.ranks.values() if state.present]

    def healthy(self) -> list[RankState]:
        """Ranks whose state can be recovered from, ascending."""
        return [state for state in self.ranks.values() if state.healthy]

    def faulty(self) -> tuple[int, ...]:
        """Ranks that are lost or whose state cannot be used."""
        return tuple(state.rank for state in self.ranks.values() if state.lost is not None or state.unusable)

    def replica_sets(self) -> list[ReplicaSet]:
        """All replica sets that any rank has named, in a fixed order."""
        found = {found for state in self.ranks.values() if state.ready for found in state.ready.replica_sets}
        return sorted(found, key=lambda replica_set: (replica_set.name, replica_set.ranks))

    def watched(self, rank: int, now: float) -> bool:
        """True when an agent that is alive will report this rank's death."""
        return any(
            rank in agent.registered.ranks and now - agent.heard_at < self.options.silence_seconds
            for agent in self.agents.values()
        )

    def own_faults(self, rank: int) -> list[Fault]:
        """Faults of this recovery that name the rank."""
        return [fault for fault in self.faults if fault.rank == rank]

    def forget_recovery(self) -> None:
        """A recovery has succeeded: its faults are history."""
        self.faults.clear()
        for state in self.ranks.values():
            state.unusable, state.unfit, state.commit = "", "", None


def _same_process(one: Register, other: Register) -> bool:
    return (one.host, one.pid) == (other.host, other.pid)


def named(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 1, 2"."""
    listed = [str(rank) for rank in sorted(ranks)]
    return ("rank " if len(listed) == 1 else "ranks ") + (", ".join(listed) or "none")
