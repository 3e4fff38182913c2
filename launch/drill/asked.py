"""Signals that ask a drill to end: noted, and handed on to the command, which then saves and ends."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

from mindio_tft_patch.proc_stat import processes

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENOUGH = 3  # the first asks the command to save, the second to end at once


class Asked:
    """Notes signals while it is entered, also between two runs of the command.

    A signal that is ignored stays ignored: `nohup` means it so.

    Attributes:
        number: the first signal; 0: none has come.
    """

    def __init__(self) -> None:
        self.number = 0
        self._count = 0
        self._group = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Asked:
        for number in _NUMBERS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @property
    def impatient(self) -> bool:
        """Whether the command is to be ended, saved or not."""
        return self._count >= _ENOUGH

    def running(self, group: int) -> None:
        """The process group of the command that runs from now on; 0: none does."""
        self._group = group
        if group and self.number:  # it came while the command was being started
            send(group, self.number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.number = self.number or number
        if self._group:
            send(self._group, number)


def send(group: int, number: int) -> None:
    """Send a signal to a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def lives(group: int) -> bool:
    """Is there a process of the group that runs? One that has ended and was not waited for does not count."""
    return any(one.group == group and one.state not in "ZX" for one in processes())
