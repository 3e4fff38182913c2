"""Handlers as the guard calls them: a phase is not interrupted by the stop that has begun its own recovery."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.processor.handlers import Handlers
from mindio_tft_patch.protocol.phases import Phase

_PHASES = (Phase.CLEAN, Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME, Phase.DUMP)


class InRecovery:
    """Runs the phases of a framework's handlers; everything else is theirs.

    A stop makes every wait for other ranks raise, until training goes on. The phases of a recovery wait for other
    ranks, too: inside them only a stop that came later does that.

    Args:
        handlers: of the framework.
        flag: raised by stop().
        resumed: called after the phase resume.
    """

    def __init__(self, handlers: Handlers, flag: StopFlag, resumed: Callable[[], None] = lambda: None) -> None:
        self._handlers = handlers
        self._flag = flag
        self._resumed = resumed
        for phase in _PHASES:
            method = getattr(handlers, phase.value, None)
            if callable(method):
                setattr(self, phase.value, self._inside(method, phase))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handlers, name)

    def as_handlers(self) -> Handlers:
        """This object, as what it stands for."""
        return cast(Handlers, self)

    def _inside(self, method: Callable[..., Any], phase: Phase) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._flag.recovering():
                outcome = method(*args, **kwargs)
            if phase is Phase.RESUME:
                self._flag.clear()
                self._resumed()
            return outcome

        return run
