"""When stand-bys are started, passed over and given up: with stand-bys that are no processes."""

from __future__ import annotations

import os
import sys

import pytest

from mindio_tft_patch.launch.reserve import MOST_FAILURES, REFILL_SECONDS, Order, Reserve, cpus_of, standby_command

ORDER = Order(("python", "-u", "a.py"), ("python", "-u", "a.py"), {"RANK": "1"}, None, None)


class FakeProcess:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code


class FakeStandby:
    def __init__(self, pid: int) -> None:
        self.process = FakeProcess(pid)
        self.ready = self.obedient = True
        self.announced = self.ended = self.closed = False

    def accept(self, order: bytes) -> bool:
        return self.obedient

    def close(self) -> None:
        self.closed = True

    def end(self) -> None:
        self.ended = True


class Shelf:
    """A reserve, a clock, and what was started."""

    def __init__(self, size: int = 1) -> None:
        self.now = 100.0
        self.started: list[FakeStandby] = []
        self.reserve = Reserve(size, self._start, clock=lambda: self.now)  # type: ignore[arg-type]

    def _start(self) -> FakeStandby:
        self.started.append(FakeStandby(len(self.started)))
        return self.started[-1]

    def passes(self, seconds: float, *, recovering: bool = False) -> None:
        self.now += seconds
        self.reserve.tend(recovering=recovering)


def test_a_stand_by_is_started_at_once_and_not_more_than_asked_for() -> None:
    shelf = Shelf(size=2)
    for _ in range(5):
        shelf.passes(0.5)
    assert len(shelf.started) == 2


def test_the_next_one_waits_until_the_recovery_is_over_and_a_while_longer() -> None:
    shelf = Shelf()
    shelf.passes(0.0)
    assert shelf.reserve.take(ORDER) is shelf.started[0].process
    assert shelf.started[0].closed and not shelf.started[0].ended
    for _ in range(100):
        shelf.passes(1.0, recovering=True)
    shelf.passes(0.1)
    shelf.passes(REFILL_SECONDS - 0.1)
    assert len(shelf.started) == 1
    shelf.passes(0.2)
    assert len(shelf.started) == 2


@pytest.mark.parametrize("trouble", ["dead", "not ready", "deaf"])
def test_a_stand_by_that_is_no_use_is_passed_over(trouble: str) -> None:
    shelf = Shelf()
    shelf.passes(0.0)
    standby = shelf.started[0]
    standby.process.code = -9 if trouble == "dead" else None
    standby.ready = trouble != "not ready"
    standby.obedient = trouble != "deaf"
    assert shelf.reserve.take(ORDER) is None
    assert standby.ended is (trouble != "not ready"), "one that is only late may serve next time"


def test_whoever_comes_too_late_is_told_who_got_the_stand_by(caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf()
    shelf.passes(0.0)
    assert shelf.reserve.take(ORDER) is not None
    assert shelf.reserve.take(ORDER) is None
    assert "no stand-by is used: the only stand-by has just become rank 1; a new process is started" in caplog.text
    shelf.passes(0.1)
    shelf.passes(REFILL_SECONDS)
    shelf.started[1].process.code = 1
    shelf.passes(0.1)
    caplog.clear()
    assert shelf.reserve.take(ORDER) is None
    assert "no stand-by is used: there is none" in caplog.text


def test_the_second_stand_by_serves_when_the_first_has_died() -> None:
    shelf = Shelf(size=2)
    shelf.passes(0.0)
    shelf.passes(0.1)
    shelf.started[0].process.code = 1
    assert shelf.reserve.take(ORDER) is shelf.started[1].process


def test_a_dead_stand_by_is_noticed_and_replaced() -> None:
    shelf = Shelf()
    shelf.passes(0.0)
    shelf.started[0].process.code = 1
    shelf.passes(0.1)
    assert shelf.started[0].ended
    shelf.passes(REFILL_SECONDS)
    assert len(shelf.started) == 2


def test_stand_bys_that_never_become_ready_are_given_up() -> None:
    shelf = Shelf()
    for _ in range(100):
        shelf.passes(REFILL_SECONDS)
        for standby in shelf.started:
            standby.ready, standby.process.code = False, 1
    assert len(shelf.started) == MOST_FAILURES


def test_all_are_ended_with_the_job() -> None:
    shelf = Shelf(size=2)
    shelf.passes(0.0)
    shelf.passes(0.1)
    shelf.reserve.close()
    assert all(standby.ended for standby in shelf.started)
    shelf.passes(100.0)
    assert len(shelf.started) == 2


def test_a_binding_to_processors_is_read_from_torchelastics_numactl() -> None:
    assert cpus_of(()) == frozenset()
    assert cpus_of(("numactl", "--physcpubind=0-2,8")) == {0, 1, 2, 8}
    assert cpus_of(("numactl", "--cpunodebind=0")) is None
    assert cpus_of(("taskset", "-c", "1")) is None


def test_no_stand_by_is_used_behind_an_unknown_wrapper() -> None:
    shelf = Shelf()
    shelf.passes(0.0)
    wrapped = Order(ORDER.command, ("taskset", "1", *ORDER.command), {}, None, None)
    assert shelf.reserve.take(wrapped) is None
    assert not shelf.started[0].ended


def test_ranks_that_are_no_python_programs_have_no_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(os.environ, "PYTHON_EXEC", raising=False)
    assert standby_command("/bin/sh", ["train.sh"]) is None
    assert standby_command(sys.executable, ["-m", "train"]) is None
    command = standby_command(sys.executable, ["-u", "-m", "train", "--a"])
    assert command == [sys.executable, "-u", "-m", "mindio_tft_patch.launch.standby", "-m", "train", "--a"]
