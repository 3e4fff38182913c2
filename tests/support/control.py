"""A job of processors and agents around the controller's state machine, without network, thread or clock."""

from __future__ import annotations

from mindio_tft_patch.controller.events import Event, Instruction, Received, Send, Terminate, Tick, agent, processor
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
    Progress,
    Ready,
    Register,
    ReplicaSet,
    Role,
    UpMessage,
)
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

DUMP_ONLY = (Strategy.DUMP,)


def register(rank: int, world_size: int = 4, pid: int | None = None) -> Register:
    return Register(role=Role.PROCESSOR, rank=rank, world_size=world_size, pid=pid or 100 + rank, host="a")


def progress(
    step: int, activity: Activity = Activity.COMPUTE, waiting: float | None = None, median: float | None = 1.0
) -> Progress:
    return Progress(CommitState(step), activity, 0.0, in_collective_seconds=waiting, step_seconds=median)


class Job:
    """Four ranks, replica sets (0, 2) and (1, 3), one agent; everything at step 5 unless told otherwise."""

    def __init__(
        self,
        *,
        world_size: int = 4,
        with_agent: bool = True,
        ready: tuple[int, ...] | None = None,
        start_step: int = 0,
        strategies: tuple[Strategy, ...] = DUMP_ONLY,
        **options: float,
    ) -> None:
        self.options = Options(world_size=world_size, **options)  # type: ignore[arg-type]
        self.machine = Machine(self.options)
        self.now = 1000.0
        self.world_size = world_size
        self.half = world_size // 2
        self.outbox: list[Instruction] = []
        if with_agent:
            ranks = tuple(range(world_size))
            self.feed(Received(agent(0), Register(Role.AGENT, -1, world_size, 99, "a", 0, ranks)))
        for rank in range(world_size):
            self.say(rank, register(rank, world_size))
        for rank in range(world_size) if ready is None else ready:
            self.say(rank, Ready(rank, start_step, (self.set_of(rank),), strategies))
        self.outbox.clear()

    def set_of(self, rank: int) -> ReplicaSet:
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
        return self.feed(Received(agent(0), FaultReport(rank, FaultKind.PROCESS_DEATH, detail)))

    def reports(self, rank: int, kind: FaultKind, detail: str = "") -> list[Instruction]:
        return self.say(rank, FaultReport(rank, kind, detail))

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
        for node, known in self.machine.roster.agents.items():
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
