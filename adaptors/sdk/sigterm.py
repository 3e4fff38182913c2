"""SIGTERM to a rank: somebody wants the job to end, and the last completed step is worth saving first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


def catch(come: Callable[[], bool]) -> None:
    """Have SIGTERM call `come`, unless the framework has a handler of its own. Main thread only; elsewhere nothing.

    Args:
        come: False: the signal is to have its ordinary effect.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, None):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not come():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)


def aside(action: Callable[[], object]) -> None:
    """Do something outside the handler, which interrupts the main thread and may find it holding any lock."""
    threading.Thread(target=action, name="mindio-tft-sigterm", daemon=True).start()
