"""How far the optimizer state of this rank is, as the training loop says: begin of an update, end of an update.

    tft_start_copy_os -> tft_start_updating_os(backup_step) -> tft_end_updating_os(step)

A state whose update was begun and not ended is half done: it cannot be used, unless the framework keeps a copy of the
state before the update (enable_local_copy) and has said of which step (`backup_step`).
"""

from __future__ import annotations

import logging
import threading

from mindio_tft_patch.adaptors.sdk import checks
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.messages import CommitState
from mindio_tft_patch.protocol.phases import Activity

log = logging.getLogger("mindio_tft_patch.sdk")

NO_BACKUP = -1


class ForceStopError(RuntimeError):
    """The training thread is to leave the training function now. Its text is what the original's has."""


class Updates:
    """The marks of one rank.

    Args:
        board: where the control thread reads them.
    """

    def __init__(self, board: ProgressBoard) -> None:
        self._board = board
        self._changed = threading.Condition()
        self._step = 0
        self._updating = False
        self._backup = NO_BACKUP
        self._stop = ""
        self._corrupted = False
        self.local_copy = False

    @property
    def step(self) -> int:
        """Last step whose update was ended; 0: none."""
        return self._step

    @property
    def stopping(self) -> bool:
        """The training thread is to leave the training function."""
        return bool(self._stop)

    # On the training thread.

    def copy(self) -> None:
        """The framework begins to copy the state; what it copies from stays as it is.

        Raises:
            ForceStopError: no update may begin now.
        """
        self.leave_if_stopped()

    def start(self, backup_step: int) -> None:
        """An update begins.

        Raises:
            ConfigError: backup_step is none.
            ForceStopError: no update may begin now.
        """
        checks.integer("tft_start_updating_os", "backup_step", backup_step, NO_BACKUP, checks.STEP_END - 1)
        with self._changed:
            self.leave_if_stopped()
            self._updating, self._backup = True, backup_step if self.local_copy else NO_BACKUP
        self._board.set_commit(CommitState(step=self._step, updating=self._step + 1))
        self._board.enter(Activity.UPDATE)

    def end(self, step: int) -> None:
        """The update is complete: the state is that of `step`.

        Raises:
            ConfigError: step is none.
        """
        checks.integer("tft_end_updating_os", "step", step, 1, checks.STEP_END - 1)
        with self._changed:
            if not self._updating:
                log.warning("tft_end_updating_os(%d) without tft_start_updating_os; ignored", step)
                return
            self._step, self._updating = step, False
            self._changed.notify_all()
        self._board.set_commit(CommitState(step=step))
        self._board.enter(Activity.COMPUTE)

    def leave_if_stopped(self) -> None:
        """Where the training thread can leave without harm.

        Raises:
            ForceStopError: it must.
        """
        if self._stop:
            raise ForceStopError(f"FORCE STOP: {self._stop}")

    # On the control thread.

    def forbid(self, reason: str) -> None:
        """From now on no update begins; one that was begun is ended."""
        with self._changed:
            self._stop = reason

    def allow(self) -> None:
        """Updates may begin again."""
        with self._changed:
            self._stop = ""

    def wait_until_ended(self, timeout_seconds: float) -> bool:
        """Wait for an update that was begun; False when it is not ended in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._updating, timeout_seconds)

    def corrupted(self) -> None:
        """What this rank holds may be wrong, whatever the marks say."""
        self._corrupted = True

    def commit(self) -> CommitState | None:
        """The state that can be used; None: it cannot.

        A rank that has completed a step and keeps a copy of the one before can give either; `at_gate` is then the
        other step that the controller may choose.
        """
        if self._corrupted or (self._updating and self._backup == NO_BACKUP):
            return None
        if self._updating:
            return CommitState(step=self._backup)
        another = self._backup if self._backup not in (NO_BACKUP, self._step) else None
        return CommitState(step=self._step, at_gate=another)

    def holds(self, step: int) -> bool:
        """Is there a usable state of this step?"""
        commit = self.commit()
        return commit is not None and step in (commit.step, commit.at_gate)

    def reached(self, step: int) -> None:
        """A recovery has brought the state to `step`."""
        with self._changed:
            self._step, self._updating, self._backup, self._corrupted = step, False, NO_BACKUP, False
        self._board.set_commit(CommitState(step=step))
