"""The cluster manager's callbacks: registered by name, called on a thread of their own with what they are documented to
get.

The controller's thread never waits for a callback, and a callback may call any tft_notify_controller function: that
waits for the controller, not the other way round. What a callback raises is logged and counts as 1: the manager does
not know, and is not waited for.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from mindio_tft_patch.controller.events import (
    Report,
    ReportFaults,
    ReportResult,
    ReportStopped,
    ReportStrategies,
    Unheard,
)

log = logging.getLogger("mindio_tft_patch.sdk")

FAULTS, STOPPED, STRATEGIES, RESULT = "report_fault_ranks", "report_stop_complete", "report_strategies", "report_result"
ACTIONS = (FAULTS, STOPPED, STRATEGIES, RESULT)


def call_of(report: Report) -> tuple[str, tuple[Any, ...]]:
    """Action and arguments, as the API reference has them."""
    ranks = dict(report.ranks)
    if isinstance(report, ReportFaults):
        return FAULTS, (ranks,)
    if isinstance(report, ReportStopped):
        return STOPPED, (int(report.code), report.text, ranks)
    if isinstance(report, ReportStrategies):
        return STRATEGIES, (ranks, list(report.words))
    assert isinstance(report, ReportResult)
    return RESULT, (int(report.code), report.text, ranks, report.word)


class CallbackManager:
    """The manager behind the callbacks.

    Args:
        callbacks: by action; one that is registered later takes the place of the one before.
        unheard: told of a report that could not be delivered; from the callbacks' thread.
    """

    def __init__(self, callbacks: dict[str, Callable[..., Any]], unheard: Callable[[Unheard], object]) -> None:
        self._callbacks = callbacks
        self._unheard = unheard
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mindio-tft-manager", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def tell(self, report: Report) -> None:
        """Deliver a report, after those before it."""
        self._reports.put(report)

    def close(self) -> None:
        """Deliver what is left, and end; does not wait."""
        self._reports.put(None)

    def _run(self) -> None:
        while True:
            report = self._reports.get()
            if report is None:
                return
            action, arguments = call_of(report)
            log.info("%s%r", action, arguments)
            try:
                self._callbacks[action](*arguments)
            except Exception:
                log.exception("The callback %s has failed; the cluster manager is not waited for.", action)
                self._unheard(Unheard(f"{action} could not be delivered to the cluster manager"))
