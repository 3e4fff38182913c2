"""A thread that keeps one connection to the controller: registering, signs of life, sending, receiving, reconnecting.

`processor.client.Client` and `processor.agent_client.AgentClient` say what is sent and what becomes of commands.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol
from uuid import uuid4

import msgspec

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError
from mindio_tft_patch.logs import CONTEXT
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Do, DownMessage, Register, UpMessage, Welcome
from mindio_tft_patch.protocol.phases import Phase
from mindio_tft_patch.protocol.wire import PeerSocket

logger = logging.getLogger("mindio_tft_patch.client")

TRY_SECONDS = 1.0  # one of TTP_RETRY_TIMES tries to reach the controller
SILENCE_BEATS = 6  # the controller answers every second heartbeat or so


class Channel(Protocol):
    """What a link needs of a socket; protocol.wire.PeerSocket, or a fake."""

    @property
    def trouble(self) -> str:
        """What stands between this peer and the controller."""
        ...

    def send(self, message: UpMessage) -> bool:
        """Queue a message; False when that is not possible now."""
        ...

    def receive(self, timeout_seconds: float) -> list[DownMessage]:
        """Messages that have arrived."""
        ...

    def wake(self) -> None:
        """End a `receive` of another thread."""
        ...

    def close(self) -> None:
        """Close."""
        ...


class Link:
    """One connection to the controller and its thread.

    Args:
        config: addresses, tries and intervals.
        endpoint: where the controller is.
        register: how this peer introduces itself, at the start and after each reconnection.
        connect: opens the channel; called on the thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: Config,
        endpoint: Endpoint,
        register: Register,
        *,
        connect: Callable[[Endpoint], Channel] = PeerSocket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._endpoint = endpoint
        self._register = msgspec.structs.replace(register, life=uuid4().hex)
        self._connect = connect
        self._clock = clock
        self._outbox: deque[UpMessage] = deque()
        self._channel: Channel | None = None
        self._welcome: Welcome | None = None
        self._refusal: Welcome | None = None  # one that may end by itself
        self._answered = threading.Event()
        self._stopping = False
        self._failure: Exception | None = None
        self._heard_at = float("-inf")
        self._warned = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="mindio-tft-control", daemon=True)
        self.attempt = 0

    @property
    def connected(self) -> bool:
        """True while the controller has been heard of lately."""
        return self._clock() - self._heard_at < self._silence_seconds

    @property
    def returning(self) -> bool:
        """True when this process takes the place of one that was lost while the job goes on; known after `start`."""
        return self._welcome is not None and self._welcome.returning

    @property
    def _silence_seconds(self) -> float:
        return max(5.0, SILENCE_BEATS * self._config.heartbeat_seconds)

    def start(self) -> None:
        """Connect and register.

        A refusal because another process was heard of a moment ago is no reason to give up: it is asked again.

        Raises:
            ControlError: the controller cannot be reached within TTP_RETRY_TIMES tries of about a second, or refuses.
        """
        self._thread.start()
        for _ in range(self._config.retry_times):
            if self._answered.wait(TRY_SECONDS):
                break
        welcome, failure, channel = self._welcome or self._refusal, self._failure, self._channel
        if welcome is not None and welcome.accepted:
            return
        trouble = channel.trouble if channel is not None else "no connection was opened"
        self.close()
        if isinstance(failure, ControlError):
            raise failure
        if welcome is not None:
            raise ControlError(f"The controller refuses this peer: {welcome.reason}")
        raise ControlError(
            f"No answer from the controller at {self._endpoint.address} port {self._endpoint.port} within "
            f"{self._config.retry_times} tries ({failure or trouble}). Check that TTP_ADDR (or PROCESSOR_ADDR) and "
            "TTP_PORT are the same on all nodes and reachable from this one, that TTP_TLS is set alike everywhere, and "
            "that the keys are those of this job; TTP_RETRY_TIMES gives it more time."
        )

    def close(self) -> None:
        """Send what is queued, close and end the thread; does nothing in a forked child."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._stopping = True
        channel = self._channel
        if channel is not None:
            channel.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=3.0)

    def _post(self, message: UpMessage) -> None:
        """Queue a message for the thread to send; from any thread."""
        if os.getpid() != self._pid or self._stopping:
            return
        self._outbox.append(message)
        channel = self._channel
        if channel is not None:
            channel.wake()

    # What a subclass says.

    def _beat(self) -> UpMessage:
        """A sign of life."""
        raise NotImplementedError

    def _again(self) -> list[UpMessage]:
        """What the controller must be told again after a reconnection, beside Register."""
        return []

    def _back(self) -> None:
        """The controller answers again, perhaps another one than before; runs on the thread."""

    def _obey(self, do: Do) -> None:
        """A command has arrived; runs on the thread and must return at once."""
        raise NotImplementedError

    # The thread.

    def _run(self) -> None:
        try:
            self._channel = self._connect(self._endpoint)
        except Exception as error:
            self._failure = error
            self._answered.set()
            return
        channel = self._channel
        try:
            self._loop(channel)
        except Exception:
            logger.exception("The control thread has ended by an error; training goes on unprotected.")
        finally:
            channel.close()

    def _loop(self, channel: Channel) -> None:
        beat_at = register_at = self._clock()
        while not self._stopping:
            now = self._clock()
            if (self._welcome is None or not self.connected) and now >= register_at:
                self._introduce(channel, now)
                register_at = now + TRY_SECONDS
            if now >= beat_at and self._welcome is not None:
                channel.send(self._beat())
                # A late beat must not be followed by a burst.
                beat_at = max(beat_at + self._config.heartbeat_seconds, now)
            self._flush(channel)
            wait = TRY_SECONDS if self._welcome is None else max(0.0, beat_at - self._clock())
            for message in channel.receive(min(wait, TRY_SECONDS)):
                self._take(message)
        self._flush(channel)

    def _introduce(self, channel: Channel, now: float) -> None:
        if self._welcome is not None and not self._warned:
            self._warned = True
            logger.warning(
                "The controller has not been heard of for %.0f s: training goes on, but unprotected, until it answers.",
                now - self._heard_at,
            )
        channel.send(msgspec.structs.replace(self._register, attempt=self.attempt))
        if self._welcome is not None:
            for message in self._again():
                channel.send(message)

    def _flush(self, channel: Channel) -> None:
        while self._outbox:
            if not channel.send(self._outbox[0]):
                return
            self._outbox.popleft()

    def _take(self, message: DownMessage) -> None:
        self._heard_at = self._clock()
        if isinstance(message, Do):
            self._take_command(message)
            return
        if self._welcome is None and message.passing:
            logger.info("The controller refuses this peer for now: %s", message.reason)
            self._refusal = message
        elif self._welcome is None:
            self._welcome = message
            self.attempt = max(self.attempt, message.attempt)
            self._answered.set()
        elif self._warned and message.accepted:
            self._warned = False
            logger.info("The controller is back.")
            self._back()
        elif not message.accepted:
            logger.error("The controller refuses this peer: %s", message.reason)

    def _take_command(self, do: Do) -> None:
        if do.attempt < self.attempt:
            logger.debug("Dropped %s of attempt %d: attempt %d is current.", do.phase.value, do.attempt, self.attempt)
            return
        self.attempt = CONTEXT.attempt = do.attempt
        CONTEXT.phase = "" if do.phase is Phase.RESUME else do.phase.value
        self._obey(do)
