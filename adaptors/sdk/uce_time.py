"""When an on-chip memory error came, compared with the optimizer update: can it be repaired from a replica?

Two time stamps of the device frame the update of each step; the runtime puts one into the message of the error. An
error that came before the update which has begun since has gone into the gradients, and with them into the state of
every rank: no replica is better. One that came later has hit this rank only.

    ... update ... | error A ...... | update begins ... error B ... update ends | ... error C ...
                     not repairable                     repairable                   repairable
"""

from __future__ import annotations

import re
import sys
from typing import Any

_TIME_IN_MESSAGE = re.compile(r"time us=(\d+)")


class UpdateTimes:
    """The time stamps of the last update, in microseconds of the device's clock; None: never set."""

    def __init__(self) -> None:
        self.start: int | None = None
        self.end: int | None = None

    def set_start(self, start_time: int | None) -> None:
        """The update begins. None: ask the device."""
        self.start = device_time() if start_time is None else start_time

    def set_end(self, end_time: int | None) -> None:
        """The update has ended. None: ask the device."""
        self.end = device_time() if end_time is None else end_time

    def repairable(self, error_time: int | None, start_time: int | None = None, end_time: int | None = None) -> bool:
        """Did the error come after the begin of the last update? False also when one of the times is not known."""
        start = self.start if start_time is None else start_time
        end = self.end if end_time is None else end_time
        if not error_time or not start or not end:
            return False
        return error_time > start and error_time != end


def error_time(message: str) -> int | None:
    """The time stamp in the message of an error; None: there is none."""
    found = _TIME_IN_MESSAGE.search(message)
    return int(found[1]) if found else None


def device_time() -> int:
    """Now, by the device's clock, on the current stream; 0 where there is no NPU whose runtime can say."""
    # Looked up, not imported: without torch_npu in the process there is no such clock.
    npu: Any = getattr(sys.modules.get("torch"), "npu", None)
    if npu is None or not hasattr(npu, "Event"):
        return 0
    event = npu.Event(enable_timing=True)
    event.record()
    return int(event.recorded_time()) if hasattr(event, "recorded_time") else 0
