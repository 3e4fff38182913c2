"""The control thread of one rank: processor.guard.Guard around "wait until something happens".

    wait for a report of the training thread, or for a command
        -> report, obey the controller phase by phase (SdkHandlers), on this thread
        -> tell the training thread to call the training function again, and wait on

The guard is that of the other adaptors. There it runs the training function itself; here its body is this waiting,
because the callbacks of a framework must not run on the training thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from mindio_tft_patch.adaptors.sdk.handlers import SdkHandlers
from mindio_tft_patch.adaptors.sdk.mainline import Mainline, Report, Verdict
from mindio_tft_patch.errors import ControlError, Interrupted
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.guard import Guard
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.processor.pause import PausePoint
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState, Do
from mindio_tft_patch.protocol.phases import FaultKind

log = logging.getLogger("mindio_tft_patch.sdk")

_SLICE_SECONDS = 0.1


class TrainingFaultError(Exception):
    """What the training thread has reported, on its way to the guard."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.detail)
        self.report = report


class ReportedFaults(Detector):
    """The training thread has classified its fault already."""

    def classify(self, error: BaseException) -> FaultKind:
        """The kind that was reported."""
        if isinstance(error, TrainingFaultError):
            return error.report.kind or FaultKind.COLLATERAL
        return super().classify(error)

    def describe(self, error: BaseException) -> str:
        """The detail that was reported."""
        return error.report.detail[:300] if isinstance(error, TrainingFaultError) else super().describe(error)


class NudgingClient(Client):
    """A client that says when a command has come.

    Attributes:
        latest: attempt and phase of the last command for the guard; None: none has come.
        nudge: called when one is in the queue.
    """

    latest: tuple[int, str] | None = None
    nudge: Callable[[], None] | None = None

    def _obey(self, do: Do) -> None:
        if not self.pause.concerns(do):
            self.latest = _named(do)
        super()._obey(do)
        if self.nudge is not None:
            self.nudge()


def _named(do: Do) -> tuple[int, str]:
    return do.attempt, do.phase.value


class Commands:
    """What the guard sees of the client; notes which command was taken, and its plan."""

    def __init__(self, client: NudgingClient, handlers: SdkHandlers, mainline: Mainline) -> None:
        self._client = client
        self._handlers = handlers
        self._mainline = mainline
        self._taken: tuple[int, str] | None = None
        client.nudge = mainline.nudge

    @property
    def pause(self) -> PausePoint:
        """Orders to hold between two steps."""
        return self._client.pause

    @property
    def connected(self) -> bool:
        """Has the controller been heard of lately?"""
        return self._client.connected

    @property
    def waiting(self) -> bool:
        """Has a command come that nobody has taken?"""
        return self._client.latest != self._taken

    def report(self, kind: FaultKind, detail: str) -> None:
        """Tell the controller about a fault of this rank."""
        self._client.report(kind, detail)

    def next_command(self, timeout_seconds: float) -> Do | None:
        """The next command, or None after the time-out.

        Raises:
            ControlError: the processor was closed meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        do = None
        while do is None and time.monotonic() < deadline:
            if self._mainline.finished:
                raise ControlError("the processor was closed during a recovery")
            do = self._client.next_command(min(timeout_seconds, _SLICE_SECONDS))
        if do is not None:
            self._taken = _named(do)
            self._handlers.state.plan = do.plan
        return do

    def done(self, do: Do, commit: CommitState | None, outcome: Outcome, seconds: float) -> None:
        """A phase is complete."""
        self._client.done(do, commit, outcome, seconds)

    def failed(self, do: Do, reason: str, *, collateral: bool = False) -> None:
        """A phase failed."""
        self._client.failed(do, reason, collateral=collateral)


class RankThread:
    """Runs the guard of one rank.

    Args:
        tell: takes in a report before the controller hears of it; True when it is to hear of it.
        on_exit: called with the reason and the checkpoint when the job ends.
    """

    def __init__(
        self,
        client: NudgingClient,
        handlers: SdkHandlers,
        mainline: Mainline,
        board: ProgressBoard,
        *,
        patience_seconds: float,
        tell: Callable[[Report], bool],
        on_exit: Callable[[str, str], None],
    ) -> None:
        self.commands = Commands(client, handlers, mainline)
        self._handlers = handlers
        self._mainline = mainline
        self._tell = tell
        self._again = self._returning = False
        self.guard = Guard(
            self.commands,
            handlers,
            board,
            patience_seconds=patience_seconds,
            detector=ReportedFaults(),
            on_exit=on_exit,
        )
        self._thread = threading.Thread(target=self._run, name="mindio-tft-callbacks", daemon=True)

    def start(self, *, returning: bool = False) -> None:
        """Begin to attend. returning: obey first; the training thread waits for its verdict already."""
        self._returning = returning
        self._thread.start()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the end of the thread, after Mainline.finish()."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        try:
            self._handlers.accelerator.use()
            self._again = self._returning
            self.guard.run(self._attend, returning=self._returning)
        except SystemExit:
            self._mainline.release(Verdict.LEAVE)
        except BaseException as problem:
            if not isinstance(problem, (TrainingFaultError, Interrupted, ControlError)):
                log.exception("the control thread has ended by an error; training goes on unprotected")
            self._mainline.release(Verdict.ALONE)

    def _attend(self) -> None:
        """The guard's body: returns when training has ended, and raises when there is something to obey."""
        if self._again:
            self._mainline.release(Verdict.AGAIN)
        self._again = True
        while True:
            report = self._mainline.await_event(lambda: self.commands.waiting)
            if report is None:
                if self.commands.waiting:
                    raise Interrupted
                return
            if self._tell(report):
                raise TrainingFaultError(report) from report.error
