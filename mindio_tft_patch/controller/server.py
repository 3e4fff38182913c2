"""The controller of a job: the state machine with a wire and a clock, on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from typing import Protocol

from mindio_tft_patch.config import Config
from mindio_tft_patch.controller.events import (
    Answer,
    Attached,
    Conclude,
    Event,
    Instruction,
    Log,
    Order,
    Peer,
    Received,
    Report,
    Tell,
    Terminate,
    Tick,
    Verdict,
)
from mindio_tft_patch.controller.machine import Machine
from mindio_tft_patch.controller.options import options_of
from mindio_tft_patch.controller.roster import Refusal
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.keys import Keys
from mindio_tft_patch.protocol.messages import FaultReport, Register, Role, UpMessage, Welcome
from mindio_tft_patch.protocol.wire import Incoming, ServerSocket, descriptor_shortage

__all__ = ["ControllerServer", "Verdict"]

logger = logging.getLogger("mindio_tft_patch.controller")

TICK_SECONDS = 0.05
ANSWER_BEATS = 2  # a heartbeat is answered when this many have gone without any message down
ORDER_SECONDS = 10.0  # the thread looks at an order within a tick, unless it was ended


class Manager(Protocol):
    """The cluster manager, as the controller sees it."""

    def tell(self, report: Report) -> None:
        """Take a report; called on the controller's thread, must return at once."""
        ...


class ControllerServer:
    """Runs the controller.

    Args:
        config: where to bind, and all durations.
        world_size: ranks of the job.
        keys: of the channel; None: made anew, for this job, when the channel is encrypted.
        restarts: processes may be started anew.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        world_size: int,
        *,
        keys: Keys | None = None,
        restarts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._world_size = world_size
        self._keys = keys
        self._clock = clock
        self._machine = Machine(options_of(config, world_size, restarts=restarts))
        self._manager: Manager | None = None
        self._socket: ServerSocket | None = None
        self._identities: dict[Peer, bytes] = {}
        self._peers: dict[bytes, Peer] = {}
        self._spoke_at: dict[bytes, float] = {}
        self._requests: deque[Event] = deque()
        self._orders: deque[tuple[Order, futures.Future[Answer]]] = deque()
        self._verdict: Verdict | None = None
        self._stopping = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="mindio-tft-controller", daemon=True)

    def start(self) -> Endpoint:
        """Bind, make the keys of this job, and start.

        Returns:
            Where the peers connect to; hand it to them with protocol.endpoint.publish.

        Raises:
            ControlError: the port is taken or the address cannot be bound.
            ConfigError: the keys are those of a rank.
        """
        shortage = descriptor_shortage(self._world_size)
        if shortage is not None:
            logger.warning("%s", shortage)
        self._socket = ServerSocket(self._config, self._keys)
        self._thread.start()
        logger.info("The controller listens on %s port %d.", self._config.controller_bind, self._config.port)
        return self._socket.endpoint

    def verdict(self) -> Verdict | None:
        """How the job ends; None while it runs."""
        return self._verdict

    @property
    def alive(self) -> bool:
        """Its thread runs."""
        return self._thread.is_alive()

    def registered(self) -> int:
        """Number of processors that have registered."""
        return sum(1 for peer in tuple(self._identities) if peer.role is Role.PROCESSOR)

    def terminate(self, detail: str) -> None:
        """Somebody asked the whole job to end: save, then exit. From any thread."""
        self._requests.append(Terminate(detail))
        if self._socket is not None:
            self._socket.wake()

    def attach(self, manager: Manager) -> None:
        """A cluster manager takes part in recoveries from now on. From any thread."""
        self._manager = manager
        self._requests.append(Attached())
        if self._socket is not None:
            self._socket.wake()

    def order(self, order: Order) -> Answer:
        """Obey the cluster manager, or say why not. From any thread but the controller's; waits for it."""
        if self._socket is None or self._stopping or not self._thread.is_alive():
            return Answer(False, "the controller does not run")
        future: futures.Future[Answer] = futures.Future()
        self._orders.append((order, future))
        self._socket.wake()
        try:
            return future.result(ORDER_SECONDS)
        except futures.TimeoutError:
            return Answer(False, "the controller does not answer")

    def close(self) -> None:
        """Send what is queued, close and end the thread; does nothing in a forked child."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        if self._socket is not None:
            self._socket.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    # The thread.

    def _run(self) -> None:
        socket = self._socket
        assert socket is not None
        tick_at = self._clock()
        while not self._stopping:
            # A bug must not leave a job without controller: log it, go on with the next event.
            try:
                for incoming in socket.receive(TICK_SECONDS):
                    self._take(socket, incoming)
                while self._requests:
                    self._handle(socket, self._requests.popleft())
                while self._orders:
                    self._obey(socket, *self._orders.popleft())
                if self._clock() >= tick_at:
                    self._handle(socket, Tick())
                    tick_at = self._clock() + TICK_SECONDS
            except Exception:
                logger.exception("The controller failed at an event; it goes on with the next.")
                time.sleep(TICK_SECONDS)
        with contextlib.suppress(Exception):
            socket.close()
        for _, future in self._orders:
            future.set_result(Answer(False, "the controller has ended"))

    def _take(self, socket: ServerSocket, incoming: Incoming) -> None:
        message, now = incoming.message, self._clock()
        if isinstance(message, Register):
            peer = self._introduce(socket, incoming.identity, message, now)
        else:
            peer = self._peers.get(incoming.identity)
            if peer is None:
                socket.complaints.warn("stranger", f"Dropped a {_name(message)} of a peer that has not registered.")
                return
            if not self._may_say(peer, message):
                text = f"Dropped a {_name(message)} about rank {message.rank} of {peer.role.value} {peer.index}."
                socket.complaints.warn("rank", text)
                return
        if peer is None:
            return
        self._handle(socket, Received(peer, message))
        self._answer_sparsely(socket, incoming.identity, now)

    def _introduce(self, socket: ServerSocket, identity: bytes, register: Register, now: float) -> Peer | None:
        peer = Peer(register.role, register.node if register.role is Role.AGENT else register.rank)
        same = self._identities.get(peer) == identity
        refusal = self._machine.refusal(register, now, same_connection=same)
        taken = self._peers.get(identity)
        if refusal is None and taken is not None and taken != peer:
            refusal = Refusal(f"this connection belongs to {taken.role.value} {taken.index} already")
        if refusal is not None:
            who = f"{peer.role.value} {peer.index} (process {register.pid} on {register.host})"
            socket.complaints.warn("refused", f"Refused {who}: {refusal.reason}")
            welcome = Welcome(self._machine.attempt, False, reason=refusal.reason, passing=refusal.passing)
            socket.send(identity, welcome)
            return None
        former = self._identities.get(peer)
        if former is not None and former != identity:
            self._peers.pop(former, None)
            self._spoke_at.pop(former, None)
        self._identities[peer] = identity
        self._peers[identity] = peer
        return peer

    def _may_say(self, peer: Peer, message: UpMessage) -> bool:
        if peer.role is Role.PROCESSOR:
            return message.rank == peer.index
        agent = self._machine.roster.agents.get(peer.index)
        return isinstance(message, FaultReport) and agent is not None and message.rank in agent.registered.ranks

    def _answer_sparsely(self, socket: ServerSocket, identity: bytes, now: float) -> None:
        """Let the peer know that the controller lives."""
        if now - self._spoke_at.get(identity, 0.0) < ANSWER_BEATS * self._config.heartbeat_seconds:
            return
        self._spoke_at[identity] = now
        socket.send(identity, self._machine.welcome(self._peers[identity]))

    def _handle(self, socket: ServerSocket, event: Event) -> None:
        now = self._clock()
        for instruction in self._machine.handle(event, now):
            self._carry_out(socket, instruction, now)

    def _obey(self, socket: ServerSocket, order: Order, future: futures.Future[Answer]) -> None:
        answer = Answer(False, "the controller failed at it; its log says more")
        try:
            now = self._clock()
            for instruction in self._machine.handle(order, now):
                if isinstance(instruction, Answer):
                    answer = instruction
                else:
                    self._carry_out(socket, instruction, now)
        finally:
            future.set_result(answer)

    def _carry_out(self, socket: ServerSocket, instruction: Instruction, now: float) -> None:
        if isinstance(instruction, Log):
            level = logging.getLevelName(instruction.level.upper())
            logger.log(level, "%s", instruction.text, extra={"fields": instruction.fields})
        elif isinstance(instruction, Conclude):
            self._verdict = instruction.verdict
        elif isinstance(instruction, Tell):
            if self._manager is not None:
                self._manager.tell(instruction.report)
        elif isinstance(instruction, Answer):
            return  # to an event that nobody waits for
        else:
            identity = self._identities.get(instruction.peer)
            if identity is None or not socket.send(identity, instruction.message):
                who = f"{instruction.peer.role.value} {instruction.peer.index}"
                socket.complaints.warn(f"unreachable {who}", f"{who} cannot be reached.")
                return
            self._spoke_at[identity] = now


def _name(message: UpMessage) -> str:
    return type(message).__name__
