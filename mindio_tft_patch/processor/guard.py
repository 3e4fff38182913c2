"""The loop around train(): what a rank's main thread does from the moment a fault reaches it.

    body() raises -> classify -> report -> obey the controller, phase by phase -> body() again, or leave

A process that takes the place of a lost one begins in the middle: it obeys first and only then calls body().

The guard knows no framework. The controller decides every phase; the handler method of the same name carries it out.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar

from mindio_tft_patch.errors import ControlError, Interrupted, RecoveryError
from mindio_tft_patch.processor.detect import Detector
from mindio_tft_patch.processor.handlers import Handlers, Outcome
from mindio_tft_patch.processor.pause import PausePoint
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
    def pause(self) -> PausePoint:
        """Orders to hold between two steps."""
        ...

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
        patience_seconds: how long to wait when the controller says nothing, before the original exception is raised
            as if there was no plugin. Once it has given a command, it may be silent for as long as it can be reached.
        on_exit: called with the reason and the checkpoint path before the process ends.
        note: what else an exception says, for the detail of its report; empty: nothing.

    Attributes:
        entered: `run` was called: the set-up is over.
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
        note: Callable[[BaseException], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._handlers = handlers
        self._board = board
        self._patience_seconds = patience_seconds
        self.detector = detector or Detector()
        self._on_exit = on_exit
        self._note = note
        self._clock = clock
        self.entered = False

    def run(self, body: Callable[[], T], *, returning: bool = False) -> T:
        """Call `body` until it returns; after each fault do what the controller says.

        Args:
            returning: this process takes the place of a lost one: the controller says when `body` may begin.

        Raises:
            SystemExit: with EXIT_CODE when the controller ends the job, or body's own.
            ControlError: a returning process has lost the controller.
            BaseException: body's own, when the controller cannot be reached.
        """
        self.entered = True
        if returning:
            self._recover(None)
        while True:
            try:
                return body()
            except SystemExit:
                raise
            except BaseException as error:
                self._recover(error)

    def boundary(self, step: int) -> None:
        """Between two steps, called by the training loop before it begins another: hold when the controller says so.

        Args:
            step: last completed step.

        Raises:
            Interrupted: the controller stops training, perhaps because of a fault elsewhere.
        """
        order = self._channel.pause.forbidding(step)
        if order is not None:
            with self._board.doing(Activity.PAUSE):
                self._hold(step, order)

    def _hold(self, step: int, order: Do | None) -> None:
        point, answered = self._channel.pause, None
        deadline = self._clock() + self._patience_seconds
        while order is not None:
            if order.plan.target_step and order is not answered:
                log.info("holding after step %d: %s", step, order.plan.reason)
                answered = order
                self._obey(order)
            point.wait(order, _POLL_SECONDS)
            if self._channel.connected:
                deadline = self._clock() + self._patience_seconds
            elif self._clock() > deadline:
                log.error("no word from the controller for %g s; going on without it", self._patience_seconds)
                point.give_up()
            order = point.forbidding(step)

    def last_resort(self, error: BaseException) -> NoReturn:
        """A fault outside the function that can be run again: obey the controller, then leave.

        Raises:
            SystemExit: when the controller ends the job.
            BaseException: `error`, when it is a mistake of the set-up, which starting again does not cure, or when the
                controller has training go on, which this rank cannot.
        """
        self._recover(error)
        raise error

    def _recover(self, error: BaseException | None) -> None:
        """Obey the controller until it says resume (returns) or exit (raises). No error: this process is returning."""
        before = self._board.broken_in()
        self._board.enter(Activity.RECOVERY)
        if error is not None and not isinstance(error, Interrupted):
            kind = self.detector.classify(error)
            self._tell(error, kind)
            more = self._note(error) if self._note is not None else ""
            detail = f"{self.detector.describe(error)} (while in {before.value})"
            self._channel.report(kind, f"{detail}; {more}" if more else detail)
        forget_frames(error)
        # Whoever comes back was told so by the controller: its commands come when the others are there.
        heard = error is None
        deadline = self._clock() + self._patience_seconds
        while True:
            do = self._channel.next_command(_POLL_SECONDS)
            if do is None:
                # While other phases run elsewhere, or a lost process starts anew, the controller is silent but
                # reachable; it has time-outs of its own.
                if heard and self._channel.connected:
                    deadline = self._clock() + self._patience_seconds
                elif self._clock() > deadline:
                    self._give_up(error)
                continue
            heard = True
            deadline = self._clock() + self._patience_seconds
            if do.phase is Phase.EXIT:
                self._leave(do, error)
            if self._obey(do) and do.phase is Phase.RESUME:
                self._board.enter(Activity.BETWEEN)
                return

    def _tell(self, error: BaseException, kind: FaultKind) -> None:
        """A cause is an error; what this rank has only seen of another one's fault stands in the log."""
        caused = kind is not FaultKind.COLLATERAL
        words = "training raised %s" if caused else "training was left, since a connection to another rank broke: %s"
        log.log(logging.ERROR if caused else logging.INFO, words, self.detector.describe(error), exc_info=error)

    def _give_up(self, error: BaseException | None) -> NoReturn:
        log.error("no command from the controller for %g s; going on without it", self._patience_seconds)
        if error is not None:
            raise error
        raise ControlError(
            f"The controller was lost for {self._patience_seconds:g} s while this process was to take the place of a "
            "lost one; it cannot train by itself."
        )

    def _obey(self, do: Do) -> bool:
        began = self._clock()
        try:
            self._board.moment(f"phase_{do.phase.value}")
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
            collateral = isinstance(error, RecoveryError) and error.collateral
            level = logging.INFO if collateral else logging.ERROR
            log.log(level, "phase %s failed: %s", do.phase.value, self.detector.describe(error), exc_info=error)
            self._channel.failed(do, self.detector.describe(error), collateral=collateral)
            forget_frames(error)
            return False
        seconds = self._clock() - began
        log.info("phase %s done in %.3f s", do.phase.value, seconds)
        self._channel.done(do, self._handlers.commit_state(), outcome, seconds)
        return True

    def _leave(self, do: Do, error: BaseException | None) -> NoReturn:
        # The controller says it to people, once for the whole job.
        log.info("the job ends: %s%s", do.plan.reason, f"; checkpoint {do.plan.detail}" if do.plan.detail else "")
        self._channel.done(do, self._handlers.commit_state(), Outcome(), 0.0)
        if error is not None and self._was_set_up_wrongly(do, error):
            raise error
        if self._on_exit is not None:
            self._on_exit(do.plan.reason, do.plan.detail)
        raise SystemExit(EXIT_CODE) from error

    def _was_set_up_wrongly(self, do: Do, error: BaseException) -> bool:
        """An exception of this rank's own before training, with nothing to go on from: another try would fail too."""
        own = self.detector.classify(error) is FaultKind.EXCEPTION
        return own and not do.plan.detail and not self.entered


def forget_frames(error: BaseException | None) -> None:
    """Free what the frames of an exception hold: activations, graphs, a whole iteration's memory.

    The traceback keeps its lines, so that the exception can still be logged and raised.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
