"""Streams, events and device contexts of a device on which all work is finished as soon as it is issued."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType

import torch

CPU = torch.device("cpu")


class Stream:
    """A stream on which all work is finished as soon as it is issued."""

    cuda_stream = 0
    priority = 0
    device = CPU

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return least and greatest priority; there is one only."""
        return (0, 0)

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that has happened."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return that all work is done."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait_event(self, event: object) -> None:
        """Wait for nothing."""

    def wait_stream(self, stream: object) -> None:
        """Wait for nothing."""

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Event:
    """An event; remembers when it was recorded so that elapsed times are real."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self._recorded_at = 0.0

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._recorded_at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return milliseconds between two recorded events."""
        return (end_event._recorded_at - self._recorded_at) * 1000.0

    def query(self) -> bool:
        """Return that the event has happened."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""

    def wait(self, stream: object = None) -> None:
        """Wait for nothing."""


class Device(contextlib.ContextDecorator):
    """`torch.cuda.device(i)` and `device_of(tensor)`: a context that changes nothing."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_exc: object) -> None: ...
