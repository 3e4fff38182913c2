"""The controller's state machine: an event in, a list of instructions out. It knows no network, thread or clock.

    watching --fault--> collecting --decide_at--> walking --last phase--> watching, or concluded
                            ^                        |
                            +---- fault, failure, ---+   (a new attempt, with the next strategy that fits)
                                  time-out

This file watches and takes in messages; controller.walker walks. Walking: the phases of PATHS[strategy] in order. Each
is sent to the participants and to every agent; when all have answered Done the next one is sent. After STOP it is
known how far every rank has come: target and sources are chosen, and the strategy is looked at again. Before REBUILD
the walk holds until every process that was ordered to be started anew is ready.

A cluster manager, when one is attached, takes part: controller.orders obeys it, controller.negotiator speaks to it.

What a rank goes through when it is lost in a job that stays up:

    present --fault--> lost --named in plan.lost--> lost, awaited --another process registers--> returning
       ^                ^                              |                                            |    |
       |                +------------------ it died ---+--------------------------------------------+    |
       +------------------------------------------------------------- the recovery has succeeded --------+
"""

from __future__ import annotations

from dataclasses import replace

from mindio_tft_patch.controller import decide, watch
from mindio_tft_patch.controller.awake import AwakeClock
from mindio_tft_patch.controller.events import (
    Attached,
    Choose,
    Event,
    FaultyRanks,
    Instruction,
    PauseTraining,
    Peer,
    Received,
    SaveAndExit,
    Send,
    StopTraining,
    Terminate,
    Tick,
    Unheard,
    Verdict,
)
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.orders import SAVE_AND_EXIT, Orders
from mindio_tft_patch.controller.roster import Fault, RankState, Refusal, Roster, note, same_process
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
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Strategy


class Machine:
    """Decides for one job.

    Args:
        options: sizes and durations.
    """

    def __init__(self, options: Options) -> None:
        self.roster = Roster(options)
        self._walker = Walker(options, self.roster)
        self._orders = Orders(options, self.roster, self._walker)
        self._clock = AwakeClock(options.heartbeat_seconds)

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
        return self._walker.recovery is None and self._orders.pause is None

    def refusal(self, register: Register, now: float, *, same_connection: bool) -> Refusal | None:
        """Why a Register cannot be accepted; None when it can."""
        if self.verdict is not None and not same_connection:
            return Refusal(f"the job is ending: {self.verdict.reason}")
        return self.roster.refusal(register, self._clock.at(now), same_connection=same_connection)

    def welcome(self, peer: Peer) -> Welcome:
        """What a peer that has registered is told."""
        known = self.roster.agents.get(peer.index) if peer.role is Role.AGENT else self.roster.ranks[peer.index]
        return Welcome(attempt=self.attempt, accepted=True, returning=known is not None and known.returning)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in an event.

        Args:
            now: monotonic seconds, never less than at the last event.
        """
        now = self._clock.at(now)
        self._walker.out = []
        if isinstance(event, Tick):
            self._tick(now)
        elif isinstance(event, Terminate):
            self._end(event.detail, now)
        elif isinstance(event, (Attached, StopTraining, PauseTraining, FaultyRanks, Choose, SaveAndExit, Unheard)):
            self._walker.out.append(self._orders.obey(event, now))
            if isinstance(event, SaveAndExit):
                self._end(SAVE_AND_EXIT, now)
        elif isinstance(event.message, Register):
            self._register(event.peer, event.message, now)
        elif event.peer.role is Role.AGENT:
            self._receive_from_agent(event, now)
        else:
            self._receive(event, now)
        return self._walker.out

    def _register(self, peer: Peer, register: Register, now: float) -> None:
        if peer.role is Role.PROCESSOR:
            self._take_place(register, now)
        first = self.roster.register(register, now)
        welcome = self.welcome(peer)
        self._walker.out.append(Send(peer, welcome))
        if first:
            what = "has come back" if welcome.returning else "has registered"
            who = "rank" if peer.role is Role.PROCESSOR else "the launcher of node"
            self._walker.log("info", f"{who} {peer.index} {what}: process {register.pid} on {register.host}")
        if peer.role is Role.PROCESSOR:
            self._walker.missed_command(register.rank)
            if self._orders.pause is not None:
                self._orders.pause.missed_command(register.rank)
        elif first and welcome.returning:
            self._relaunched(register, now)

    def _take_place(self, register: Register, now: float) -> None:
        """A process that was started by hand takes the place of one that nobody has missed yet."""
        state = self.roster.ranks[register.rank]
        known = state.registered
        if known is not None and not same_process(known, register) and state.present and state.trained:
            self._fault(Fault(state.rank, FaultKind.HEARTBEAT_LOST, "another process has taken its place"), now)

    def _relaunched(self, register: Register, now: float) -> None:
        """The agent of a lost node was started again: it starts its ranks by itself."""
        for state in (self.roster.ranks[rank] for rank in register.ranks):
            if state.present and state.silent_for(now) >= self.roster.options.silence_seconds:
                detail = "it is silent, and the launcher of its node was started again"
                self._fault(Fault(state.rank, FaultKind.HEARTBEAT_LOST, detail), now)
            state.awaited = state.awaited or state.lost is not None
        self._walker.relaunched(register.ranks, now)

    def _receive_from_agent(self, event: Received, now: float) -> None:
        known = self.roster.agents.get(event.peer.index)
        if known is not None:
            known.heard_at = now
        message = event.message
        if not isinstance(message, FaultReport):
            return
        state = self.roster.ranks[message.rank]
        if state.awaited and state.registered is not None and state.registered.pid == message.pid:
            return  # of the process that was to be ended anyway; the two reports have crossed
        self._fault(Fault(message.rank, message.kind, message.detail, message.step), now)

    def _receive(self, event: Received, now: float) -> None:
        message = event.message
        state = self.roster.ranks[message.rank]
        if state.registered is None or state.awaited:
            return  # not known, or what is left of a process that another one is to replace
        state.heard_at = now
        self._take_back(state, now)
        if isinstance(message, Heartbeat):
            self.roster.note_progress(state, message.progress, now)
            if message.progress.activity is Activity.PAUSE:
                self._orders.release(state.rank)
            self._walker.repeat_exit(state, now)
        elif isinstance(message, Ready):
            self._ready(state, message, now)
        elif isinstance(message, FaultReport):
            self._fault(Fault(message.rank, message.kind, message.detail, message.step), now)
        elif isinstance(message, Finished):
            state.finished = True
            if self._orders.pause is not None:
                self._orders.pause.fails(f"rank {state.rank} has left training", now)
                self._orders.forget_pause()
            self._walker.left(state.rank, now)
        elif isinstance(message, (Done, Failed)):
            if self._orders.pause is None or not self._orders.pause.answer(state, message, now):
                self._walker.answer(state, message, now)
            self._orders.forget_pause()

    def _take_back(self, state: RankState, now: float) -> None:
        """A rank that was out of reach speaks again before anybody was told to replace it: it was the network."""
        lost = state.lost
        if lost is None or lost.kind is not FaultKind.HEARTBEAT_LOST or not self._walker.open:
            return
        state.lost = None
        if not decide.offered(self.roster, Strategy.RETRY):
            state.lost = lost
            return
        network = Fault(state.rank, FaultKind.NETWORK, f"it was out of reach for a while: {lost.detail}")
        self.roster.faults[:] = [network if fault is lost else fault for fault in self.roster.faults]
        self._walker.log("warning", f"fault: {network}", rank_of_fault=state.rank, kind=network.kind.value)
        self._walker.reachable(state.rank, now)

    def _ready(self, state: RankState, ready: Ready, now: float) -> None:
        if state.ready is None:
            self._walker.log("info", f"rank {state.rank} is ready at step {ready.start_step}")
        elif state.ready != ready:  # else sent again after a reconnection
            offered = ", ".join(strategy.value for strategy in ready.strategies) or "nothing"
            self._walker.log("debug", f"rank {state.rank} offers {offered} from now on")
        state.ready = ready
        self._walker.ready(state, now)

    def _fault(self, fault: Fault, now: float) -> None:
        if self.verdict is not None:
            return
        if fault.rank is not None:
            state = self.roster.ranks[fault.rank]
            if state.finished:
                return
            if state.awaited or (state.returning and state.ready is None):
                fault = replace(fault, on_return=True)
            elif state.lost is not None:
                if fault.losing and not state.dead:
                    state.lost = fault
                return  # a culprit that was killed: no second fault
            note(state, fault)
        self.roster.faults.append(fault)
        self._walker.log("warning", f"fault: {fault}", rank_of_fault=fault.rank, kind=fault.kind.value)
        if self._orders.pause is not None:
            self._orders.pause.ends(str(fault))
            self._orders.forget_pause()
        self._walker.fault(fault, now)

    def _end(self, detail: str, now: float) -> None:
        """Somebody wants the job to end: whatever else was going to be settled with a cluster manager."""
        self._walker.alone(now, detail)
        self._fault(Fault(None, FaultKind.TERMINATED, detail), now)

    def _tick(self, now: float) -> None:
        if self.verdict is not None:
            return
        recovery, pause = self._walker.recovery, self._orders.pause
        found: list[Fault] = []
        if pause is not None:
            found += pause.tick(now)
            self._orders.forget_pause()
        elif recovery is None or recovery.walk is None:
            found += watch.find_lost(self.roster, now)[0]
        if recovery is None and pause is None:
            # A hang that is being dealt with is not to be found again.
            found += watch.find_hang(self.roster, now)[0]
        for fault in found or self._walker.tick(now):
            self._fault(fault, now)
