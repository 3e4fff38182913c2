"""The loop around train(): what a rank's main thread does from the moment a fault reaches it.

    body() raises -> classify -> report -> obey the controller, phase by phase -> body() again, or leave

The guard knows no framework. The controller decides every phase; the handler method of the same name carries it out.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from mindio_tft_patch.errors import Interrupted, RecoveryError
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Do
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase

log = logging.getLogger("mindio_tft_patch.guard")

T = TypeVar("T")

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: the job ended because of a fault; starting it again makes sense
_POLL_SECONDS = 1.0


class Channel(Protocol):
    """What the guard needs of processor.client.Client."""

    @property
    def connected(self) -> bool:
        """Has the controller been heard of lately?"""
        ...

    def report(self, kind: FaultKind, detail: str) -> None:
        """Tell the controller about a fault of this rank."""
        ...

    def next_command(self, timeout_seconds: float) -> Do | None:
        """The next command, or None after the time-out."""
        ...

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        """A phase is complete."""
        ...

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        """A phase failed; collateral: only because of another rank."""
        ...


class Guard:
    """Runs a training function under the protection of the controller.

    Args:
        channel: connection to the controller.
        handlers: what the framework adaptor does in each phase.
        board: what this rank is doing.
        patience_seconds: how long to wait for a first command after a fault when the controller says nothing,
            before the original exception is raised as if there was no plugin.
        on_exit: called with the reason and the checkpoint path before the process ends.
    """

    def __init__(
        self,
        channel: Channel,
        handlers: Handlers,
        board: ProgressBoard,
        *,
        patience_seconds: float,
        detector: Detector | None = None,
        on_exit: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._handlers = handlers
        self._board = board
        self._patience_seconds = patience_seconds
        self.detector = detector or Detector()
        self._on_exit = on_exit
        self._clock = clock

    def run(self, body: Callable[[], T]) -> T:
        """Call `body` until it returns; after each fault do what the controller says.

        Raises:
            SystemExit: with EXIT_CODE when the controller ends the job, or body's own.
            BaseException: body's own, when the controller cannot be reached.
        """
        while True:
            try:
                return body()
            except SystemExit:
                raise
            except BaseException as error:
                self._recover(error)

    def last_resort(self, error: BaseException) -> NoReturn:
        """A fault outside the function that can be run again: obey the controller, then leave.

        Raises:
            SystemExit: when the controller ends the job.
            BaseException: `error`, when the controller has training go on, which this rank cannot.
        """
        self._recover(error)
        raise error

    def _recover(self, error: BaseException) -> None:
        """Obey the controller until it says resume (returns) or exit (raises)."""
        before = self._board.broken_in()
        self._board.enter(Activity.RECOVERY)
        if not isinstance(error, Interrupted):
            log.error("training raised %s", "".join(traceback.format_exception(error)).rstrip())
            kind = self.detector.classify(error)
            self._channel.report(kind, f"{self.detector.describe(error)} (while in {before.value})")
        deadline = self._clock() + self._patience_seconds
        while True:
            do = self._channel.next_command(_POLL_SECONDS)
            if do is None:
                # While other phases run elsewhere the controller is silent but reachable; it has time-outs of its own.
                if self._clock() > deadline:
                    log.error("no command from the controller for %g s; going on without it", self._patience_seconds)
                    raise error
                continue
            deadline = self._clock() + self._patience_seconds
            if do.phase is Phase.EXIT:
                self._leave(do, error)
            if self._obey(do) and do.phase is Phase.RESUME:
                self._board.enter(Activity.BETWEEN)
                return

    def _obey(self, do: Do) -> bool:
        began = self._clock()
        try:
            if do.phase is Phase.STOP:
                # The control thread called handlers.stop(); being here means that it has worked.
                self._handlers.arrived()
                outcome = Outcome()
            else:
                outcome = getattr(self._handlers, do.phase.value)(do.plan)
        except Interrupted:
            # A newer attempt stopped this phase; its commands are in the queue.
            self._channel.failed(do, "interrupted by a newer attempt", collateral=True)
            return False
        except BaseException as error:
            # Not only Exception: torch's checkpoint errors do not derive from it.
            log.error("phase %s failed: %s", do.phase.value, "".join(traceback.format_exception(error)).rstrip())
            collateral = isinstance(error, RecoveryError) and error.collateral
            self._channel.failed(do, self.detector.describe(error), collateral=collateral)
            return False
        seconds = self._clock() - began
        log.info("phase %s done in %.3f s", do.phase.value, seconds)
        self._channel.done(do, self._handlers.commit_state(), outcome, seconds)
        return True

    def _leave(self, do: Do, error: BaseException) -> NoReturn:
        log.error("the job ends: %s%s", do.plan.reason, f"; checkpoint {do.plan.detail}" if do.plan.detail else "")
        self._channel.done(do, self._handlers.commit_state(), Outcome(), 0.0)
        if self._on_exit is not None:
            self._on_exit(do.plan.reason, do.plan.detail)
        raise SystemExit(EXIT_CODE) from error
