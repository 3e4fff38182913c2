"""A rank must not outlive its launcher: a restart beside it would be a second writer of the same checkpoints."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

log = logging.getLogger("mindio_tft_patch.session")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent (`ttprun`) is killed. Linux only; elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        log.warning("this rank would outlive a killed launcher: %s", os.strerror(ctypes.get_errno()))
    elif os.getppid() != parent:  # it died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
