"""The rank's end of the control channel: a thread that talks to the controller while the main thread trains."""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
from collections.abc import Callable

from mindio_tft_patch.config import Config
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.link import Channel, Link
from mindio_tft_patch.processor.pause import PausePoint
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import (
    CommitState,
    Do,
    Done,
    Failed,
    FaultReport,
    Finished,
    Heartbeat,
    Ready,
    Register,
    Role,
    UpMessage,
)
from mindio_tft_patch.protocol.phases import FaultKind, Phase
from mindio_tft_patch.protocol.wire import PeerSocket

logger = logging.getLogger("mindio_tft_patch.client")


class Client(Link):
    """Speaks for one rank.

    Args:
        config: addresses, tries and intervals.
        endpoint: where the controller is.
        board: what the main thread is doing; read for every heartbeat.
        rank: global rank.
        world_size: ranks of the job.
        on_stop: called on the control thread when a STOP arrives, before the main thread can see the command; makes
            the main thread leave its collectives and must return at once.
        node: index of this node.

    Attributes:
        pause: orders to hold between two steps; Guard.boundary obeys them.
    """

    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        board: ProgressBoard,
        *,
        rank: int,
        world_size: int,
        on_stop: Callable[[], None],
        node: int = 0,
        connect: Callable[[Endpoint], Channel] = PeerSocket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        register = Register(
            role=Role.PROCESSOR, rank=rank, world_size=world_size, pid=os.getpid(), host=socket.gethostname(), node=node
        )
        super().__init__(config, endpoint, register, connect=connect, clock=clock)
        self._rank = rank
        self._board = board
        self._on_stop = on_stop
        self.pause = PausePoint()
        self._ready: Ready | None = None
        self._finished = False
        self._unanswered: FaultReport | None = None
        self._commands: queue.SimpleQueue[Do] = queue.SimpleQueue()
        self._last: tuple[int, Phase] | None = None

    def ready(self, ready: Ready) -> None:
        """Model, optimizer and groups exist: from here on this rank can be recovered.

        To be called again when what this rank offers changes; what was said last counts.
        """
        self._ready = ready
        self._post(ready)

    def report(self, kind: FaultKind, detail: str, *, step: int | None = None) -> None:
        """Something happened to this rank.

        Args:
            step: see FaultReport; default the last completed one.
        """
        step = self._board.commit.step if step is None else step
        self._unanswered = FaultReport(rank=self._rank, kind=kind, detail=detail, step=step)
        self._post(self._unanswered)

    def next_command(self, timeout_seconds: float) -> Do | None:
        """The next command for the main thread, or None when none comes in time. Stale commands are left out."""
        deadline = self._clock() + timeout_seconds
        while True:
            try:
                do = self._commands.get(timeout=max(0.0, deadline - self._clock()))
            except queue.Empty:
                return None
            if do.attempt == self.attempt:
                return do

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        """This rank has carried out a command."""
        self._post(
            Done(
                rank=self._rank,
                attempt=do.attempt,
                phase=do.phase,
                commit=commit,
                detail=outcome.detail,
                seconds=seconds,
                bytes_moved=outcome.bytes_moved,
            )
        )

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        """This rank could not carry out a command.

        Args:
            collateral: only because another rank failed or is gone; the controller does not blame this one.
        """
        self._post(Failed(rank=self._rank, attempt=do.attempt, phase=do.phase, reason=reason, collateral=collateral))

    def finished(self) -> None:
        """This rank has left training in good order."""
        self._finished = True
        self._post(Finished(rank=self._rank))

    def _beat(self) -> UpMessage:
        return Heartbeat(rank=self._rank, progress=self._board.snapshot())

    def _again(self) -> list[UpMessage]:
        messages: list[UpMessage] = [] if self._ready is None else [self._ready]
        return [*messages, Finished(rank=self._rank)] if self._finished else messages

    def _back(self) -> None:
        # A controller that was started again has dropped it, because this rank had not registered with it yet.
        if self._unanswered is not None and not self._finished:
            self._post(self._unanswered)

    def _obey(self, do: Do) -> None:
        # The controller sends a command again when this rank has reconnected meanwhile.
        if self._last == (do.attempt, do.phase):
            return
        self._last = (do.attempt, do.phase)
        # A report that comes after STOP is of the fault that is being dealt with: nothing else answers it than RESUME.
        if do.phase in (Phase.STOP, Phase.RESUME, Phase.EXIT):
            self._unanswered = None
        if self.pause.concerns(do):
            commit = self.pause.order(do, self._board.commit.step)
            if commit is not None:
                self.done(do, commit, Outcome(), 0.0)
            return
        if do.phase is Phase.STOP:
            self.pause.stop()
            try:
                self._on_stop()
            except Exception:
                logger.exception("Stopping the main thread has failed; it may stay in its collective.")
        self._commands.put(do)
