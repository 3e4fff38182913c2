"""Whether the time of a memory error lets it be repaired from a replica."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mindio_tft_patch.adaptors.sdk.uce_time import UpdateTimes, device_time, error_time


@pytest.mark.parametrize(
    ("start", "end", "error", "repairable"),
    [
        (100, 200, 250, True),  # after the update
        (100, 200, 150, True),  # inside the update: it hit this rank only
        (100, 200, 50, False),  # before it: the gradients have it
        (300, 200, 350, True),  # the next update has begun, the error came after that
        (300, 200, 250, False),  # the error came before the update that has begun since
        (100, 200, 100, False),
        (100, 200, 200, False),
        (100, 200, 0, False),
        (None, 200, 250, False),
        (100, None, 250, False),
        (0, 0, 250, False),  # no device clock
    ],
)
def test_what_can_be_repaired(start: int | None, end: int | None, error: int, repairable: bool) -> None:
    times = UpdateTimes()
    assert times.repairable(error, start, end) is repairable
    times.start, times.end = start, end
    assert times.repairable(error) is repairable


def test_the_time_stands_in_the_message() -> None:
    assert error_time("HBM MULTI BIT ECC. time us=1234567.") == 1234567
    assert error_time("HBM MULTI BIT ECC") is None


def test_without_a_device_there_is_no_device_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    times = UpdateTimes()
    times.set_start(None)
    times.set_end(None)
    assert (times.start, times.end) == (0, 0)


class Event:
    """torch.npu.Event of a runtime that knows the time of an event."""

    log: list[object] = []  # noqa: RUF012

    def __init__(self, *, enable_timing: bool) -> None:
        self.log.append(enable_timing)

    def record(self) -> None:
        self.log.append("record")

    def recorded_time(self) -> int:
        return 77


def test_the_device_is_asked_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    torch.npu = type("npu", (), {"Event": Event})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert device_time() == 77
    assert Event.log == [True, "record"]


def test_an_older_runtime_does_not_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Older(Event):
        recorded_time = property()  # type: ignore[assignment]

    torch = ModuleType("torch")
    torch.npu = type("npu", (), {"Event": Older})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert device_time() == 0
