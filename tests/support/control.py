"""A job of processors and agents around the controller's state machine, without network, thread or clock."""

from __future__ import annotations

from mindio_tft_patch.controller.events import (
    Event,
    Instruction,
    Log,
    Received,
    Send,
    Terminate,
    Tick,
    agent,
    processor,
)
from mindio_tft_patch.controller.machine import Machine
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.protocol.messages import (
    CommitState,
    Do,
    Done,
    Failed,
    FaultReport,
    Finished,
    Heartbeat,
    Plan,
    Progress,
    Ready,
    Register,
    ReplicaSet,
    Role,
    UpMessage,
    Welcome,
)
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

DUMP_ONLY = (Strategy.DUMP,)
EVERYTHING = (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP)
AFTER_CLEAN = (Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME)


def register(rank: int, world_size: int = 4, pid: int | None = None) -> Register:
    return Register(role=Role.PROCESSOR, rank=rank, world_size=world_size, pid=pid or 100 + rank, host="a")


def progress(
    step: int, activity: Activity = Activity.COMPUTE, waiting: float | None = None, median: float | None = 1.0
) -> Progress:
    return Progress(CommitState(step), activity, 0.0, in_collective_seconds=waiting, step_seconds=median)


class Job:
    """Four ranks, replica sets (0, 2) and (1, 3), one agent; everything at step 5 unless told otherwise.

    nodes: agents among which the ranks are shared evenly.
    copies: False: every rank holds a shard that no other has, as with --distributed-optimizer-no-replica.
    """

    def __init__(
        self,
        *,
        world_size: int = 4,
        with_agent: bool = True,
        nodes: int = 1,
        ready: tuple[int, ...] | None = None,
        start_step: int = 0,
        strategies: tuple[Strategy, ...] = DUMP_ONLY,
        copies: bool = True,
        **options: float,
    ) -> None:
        self.copies = copies
        self.options = Options(world_size=world_size, **options)  # type: ignore[arg-type]
        self.machine = Machine(self.options)
        self.now = 1000.0
        self.world_size = world_size
        self.half = world_size // 2
        self.outbox: list[Instruction] = []
        self.per_node = world_size // nodes
        self.dark: set[int] = set()  # nodes whose agent gives no sign of life
        self.pids = 1000
        for node in range(nodes if with_agent else 0):
            self.launches(node, pid=99 - node)
        for rank in range(world_size):
            self.say(rank, register(rank, world_size))
        for rank in range(world_size) if ready is None else ready:
            self.say(rank, Ready(rank, start_step, (self.set_of(rank),), strategies))
        self.outbox.clear()

    def launches(self, node: int, pid: int | None = None) -> None:
        """The agent of a node registers, as a new process unless told otherwise."""
        self.pids += 1
        ranks = tuple(range(node * self.per_node, (node + 1) * self.per_node))
        self.dark.discard(node)
        self.feed(Received(agent(node), Register(Role.AGENT, -1, self.world_size, pid or self.pids, "a", node, ranks)))

    def registers_again(self, rank: int) -> Welcome:
        """A new process of a rank registers."""
        self.pids += 1
        out = self.say(rank, register(rank, self.world_size, pid=self.pids))
        welcomes = [one.message for one in out if isinstance(one, Send) and isinstance(one.message, Welcome)]
        return welcomes[0]

    def gets_ready(self, rank: int, strategies: tuple[Strategy, ...] = EVERYTHING) -> None:
        self.say(rank, Ready(rank, 0, (self.set_of(rank),), strategies))

    def comes_back(self, *ranks: int) -> None:
        """New processes of these ranks register and become ready."""
        for rank in ranks:
            self.registers_again(rank)
            self.gets_ready(rank)

    def set_of(self, rank: int) -> ReplicaSet:
        if not self.copies:
            return ReplicaSet("dense", (rank,))
        low = rank % self.half
        return ReplicaSet("dense", (low, low + self.half))

    def feed(self, event: Event) -> list[Instruction]:
        out = self.machine.handle(event, self.now)
        self.outbox += out
        return out

    def say(self, rank: int, message: UpMessage) -> list[Instruction]:
        return self.feed(Received(processor(rank), message))

    def beat(
        self, *ranks: int, step: int = 5, activity: Activity = Activity.COMPUTE, waiting: float | None = None
    ) -> None:
        for rank in ranks:
            self.say(rank, Heartbeat(rank, progress(step, activity, waiting)))

    def dies(self, rank: int, detail: str = "signal 9") -> list[Instruction]:
        return self.feed(Received(agent(rank // self.per_node), FaultReport(rank, FaultKind.PROCESS_DEATH, detail)))

    def reports(self, rank: int, kind: FaultKind, detail: str = "", step: int | None = None) -> list[Instruction]:
        return self.say(rank, FaultReport(rank, kind, detail, step))

    def terminate(self) -> None:
        self.feed(Terminate("SIGTERM"))

    def finishes(self, rank: int) -> None:
        self.say(rank, Finished(rank))

    def passes(self, seconds: float, *, beating: tuple[int, ...] = (), step: float = 0.05, **beat: object) -> None:
        """Let time pass in small steps; `beating` ranks, and the agent, give signs of life once a second."""
        until = self.now + seconds
        next_beat = self.now
        while self.now < until - 1e-9:
            self.now = min(until, self.now + step)
            if self.now >= next_beat:
                next_beat += self.options.heartbeat_seconds
                self.beat(*beating, **beat)  # type: ignore[arg-type]
                self.agent_beats()
            self.feed(Tick())

    def agent_beats(self) -> None:
        for node, known in tuple(self.machine.roster.agents.items()):
            if node not in self.dark:
                self.feed(Received(agent(node), known.registered))

    def decides(self) -> None:
        """Let the window for reports pass."""
        self.passes(self.options.collect_seconds + 0.06)

    def sent(self, phase: Phase) -> dict[int, Do]:
        """The latest command of a phase, by rank."""
        return {
            one.peer.index: one.message
            for one in self.outbox
            if isinstance(one, Send) and isinstance(one.message, Do) and one.message.phase is phase
            if one.peer.role is Role.PROCESSOR
        }

    def to_agent(self, phase: Phase) -> Do | None:
        found = [
            one.message
            for one in self.outbox
            if isinstance(one, Send) and isinstance(one.message, Do) and one.message.phase is phase
            if one.peer.role is Role.AGENT
        ]
        return found[-1] if found else None

    def done(
        self, phase: Phase, *ranks: int, attempt: int | None = None, detail: str = "", **commit: int | None
    ) -> None:
        state = CommitState(**{"step": 5, **commit})  # type: ignore[arg-type]
        for rank in ranks:
            self.say(rank, Done(rank, attempt or self.machine.attempt, phase, state, detail, 0.1, 10))

    def failed(self, phase: Phase, rank: int, reason: str, *, collateral: bool = False) -> None:
        self.say(rank, Failed(rank, self.machine.attempt, phase, reason, collateral))

    def dumps(self, *ranks: int, path: str = "/save/iter_0000005") -> None:
        """Ranks walk through stop, clean and dump."""
        for phase in (Phase.STOP, Phase.CLEAN):
            self.done(phase, *ranks)
        self.done(Phase.DUMP, *ranks, detail=path)

    def walks(self, *phases: Phase, ranks: tuple[int, ...] = (0, 1, 2, 3), **commit: int | None) -> None:
        """Ranks walk through some phases."""
        for phase in phases:
            self.done(phase, *ranks, **commit)

    @property
    def plan(self) -> Plan:
        """The plan of the latest command that any rank got."""
        sent = [one.message for one in self.outbox if isinstance(one, Send) and isinstance(one.message, Do)]
        return sent[-1].plan

    @property
    def record(self) -> dict[str, object]:
        """The record of the last recovery."""
        records = [one.fields for one in self.outbox if isinstance(one, Log) and "record" in one.fields]
        return records[-1]

    @property
    def log(self) -> str:
        """All lines."""
        return "\n".join(one.text for one in self.outbox if isinstance(one, Log))
