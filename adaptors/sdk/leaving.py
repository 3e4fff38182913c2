"""The end of a process whose job the controller has ended: user code may clean up, but not for ever."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from mindio_tft_patch.adaptors.helper_processes import end_helper_processes
from mindio_tft_patch.processor.guard import EXIT_CODE

log = logging.getLogger("mindio_tft_patch.sdk")

LEAVE_SECONDS = 10.0  # as in the original


class Leaving:
    """Sees to it that the process ends.

    Args:
        seconds: left to the training thread, which may be stuck in a collective with a rank that is gone.
        end: ends the process at once with an exit code.
    """

    def __init__(self, seconds: float = LEAVE_SECONDS, end: Callable[[int], object] = os._exit) -> None:
        self._seconds = seconds
        self._end = end
        self._begun = False
        self._registered = False

    @property
    def begun(self) -> bool:
        """The job has ended."""
        return self._begun

    def begin(self) -> None:
        """The job has ended: the process ends by itself within some seconds, or is ended."""
        self._begun = True
        threading.Thread(target=self._wait, name="mindio-tft-leave", daemon=True).start()

    def close_at_exit(self, close: Callable[[], object]) -> None:
        """Have the interpreter call `close` at its end, and leave without what could wait for lost ranks."""
        if not self._registered:
            self._registered = True
            atexit.register(self._at_exit, close)

    def _wait(self) -> None:
        time.sleep(self._seconds)
        log.warning("the training thread has not ended within %g s; ending the process", self._seconds)
        end_helper_processes()
        self._end(EXIT_CODE)

    def _at_exit(self, close: Callable[[], object]) -> None:
        if not self._begun:
            close()
            return
        # The destructor of a gloo group with a pending collective waits for it, up to the group's time-out.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        end_helper_processes()
        self._end(EXIT_CODE)
