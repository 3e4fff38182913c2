"""The controller's state machine: an event in, a list of instructions out. It knows no network, thread or clock.

    watching --fault--> collecting --decide_at--> walking --last phase--> watching, or concluded
                            ^                        |
                            +---- fault, failure, ---+   (a new attempt, with the next strategy that fits)
                                  time-out

This file watches and takes in messages; controller.walker walks. Walking: the phases of PATHS[strategy] in order. Each
is sent to the participants and to every agent; when all have answered Done the next one is sent. After STOP it is
known how far every rank has come: target and sources are chosen, and the strategy is looked at again.
"""

from __future__ import annotations

from mindio_tft_patch.controller import decide
from mindio_tft_patch.controller.events import (
    Event,
    Instruction,
    Peer,
    Received,
    Send,
    Terminate,
    Tick,
    Verdict,
)
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.roster import LOSING, Fault, RankState, Roster
from mindio_tft_patch.controller.walker import Walker
from mindio_tft_patch.protocol.messages import (
    Done,
    Failed,
    FaultReport,
    Finished,
    Heartbeat,
    Ready,
    Register,
    Role,
    Welcome,
)
from mindio_tft_patch.protocol.phases import FaultKind


class Machine:
    """Decides for one job.

    Args:
        options: sizes and durations.
    """

    def __init__(self, options: Options) -> None:
        self.roster = Roster(options)
        self._walker = Walker(options, self.roster)

    @property
    def attempt(self) -> int:
        """Number of the current attempt; 0 before the first fault."""
        return self._walker.attempt

    @property
    def verdict(self) -> Verdict | None:
        """How the job ends; None while it runs."""
        return self._walker.verdict

    @property
    def idle(self) -> bool:
        """No recovery is going on."""
        return self._walker.recovery is None

    def refusal(self, register: Register, now: float, *, same_connection: bool) -> str:
        """Why a Register cannot be accepted; empty when it can."""
        if self.verdict is not None and not same_connection:
            return f"the job is ending: {self.verdict.reason}"
        return self.roster.refusal(register, now, same_connection=same_connection)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in an event.

        Args:
            now: monotonic seconds, never less than at the last event.
        """
        self._walker.out = []
        if isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, Terminate):
            self._fault(Fault(None, FaultKind.TERMINATED, event.detail), now)
        elif isinstance(event.message, Register):
            self._register(event.peer, event.message, now)
        elif event.peer.role is Role.AGENT:
            self._receive_from_agent(event, now)
        else:
            self._receive(event, now)
        return self._walker.out

    def _register(self, peer: Peer, register: Register, now: float) -> None:
        first = self.roster.register(register, now)
        self._walker.out.append(Send(peer, Welcome(attempt=self.attempt, accepted=True)))
        if first:
            who = f"{peer.role.value} {peer.index}"
            self._walker.log("info", f"{who} has registered: process {register.pid} on {register.host}")
        if peer.role is Role.PROCESSOR:
            self._walker.missed_command(register.rank)

    def _receive_from_agent(self, event: Received, now: float) -> None:
        known = self.roster.agents.get(event.peer.index)
        if known is not None:
            known.heard_at = now
        message = event.message
        if isinstance(message, FaultReport):
            self._fault(Fault(message.rank, message.kind, message.detail, message.step), now)

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        state = self.roster.ranks[message.rank]
        if state.registered is None:
            return
        state.heard_at = now
        if isinstance(message, Heartbeat):
            self.roster.note_progress(state, message.progress, now)
            self._walker.repeat_exit(state, now)
        elif isinstance(message, Ready):
            self._ready(state, message)
        elif isinstance(message, FaultReport):
            self._fault(Fault(message.rank, message.kind, message.detail, message.step), now)
        elif isinstance(message, Finished):
            state.finished = True
            self._walker.left(state.rank, now)
        elif isinstance(message, (Done, Failed)):
            self._walker.answer(state, message, now)

    def _ready(self, state: RankState, ready: Ready) -> None:
        # Sent again after a reconnection.
        if state.ready != ready:
            self._walker.log("info", f"rank {state.rank} is ready at step {ready.start_step}")
        state.ready = ready

    def _fault(self, fault: Fault, now: float) -> None:
        if self.verdict is not None:
            return
        if fault.rank is not None:
            state = self.roster.ranks[fault.rank]
            if state.finished or state.dead:
                return
            known = state.lost is not None
            if fault.kind in LOSING:
                state.lost = fault
            if known:
                return  # a culprit that was killed: no second fault
        self.roster.faults.append(fault)
        self._walker.log("warning", f"fault: {fault}", rank_of_fault=fault.rank, kind=fault.kind.value)
        self._walker.fault(fault, now)

    def _tick(self, now: float) -> None:
        if self.verdict is not None:
            return
        recovery = self._walker.recovery
        found: list[Fault] = []
        if recovery is None or recovery.walk is None:
            found += decide.find_lost(self.roster, now)[0]
        if recovery is None:
            # A hang that is being dealt with is not to be found again.
            found += decide.find_hang(self.roster, now)[0]
        for fault in found or self._walker.tick(now):
            self._fault(fault, now)
