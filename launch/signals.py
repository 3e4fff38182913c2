"""Signals to the launcher: noted while ranks may still save something, torchelastic's business otherwise."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SignalHandler = Callable[[int, "FrameType | None"], Any]


class NotedSignals:
    """Stands in front of the handlers that torchelastic has installed.

    Args:
        wake: called in the handler after a signal was noted.

    Attributes:
        noting: note signals; otherwise torchelastic's handler, which raises, is called.
        noted: signals in the order in which they came.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.noting = False
        self.noted: list[int] = []
        self._wake = wake
        self._originals: dict[int, SignalHandler] = {}

    def take_over(self) -> None:
        """Replace the handlers; call it after torchelastic has started its processes, which installs them."""
        self._originals = {}
        for name in os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
            number = getattr(signal, name.strip(), None)
            original = None if number is None else signal.getsignal(number)
            if number is not None and callable(original):
                self._originals[number] = original
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.noting:
            self.noted.append(number)
            self._wake()
            return
        self._originals[number](number, frame)
