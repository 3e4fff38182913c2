"""Waits for collectives on gloo: every kind of them ends when the controller says stop."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path

import pytest
from support.jobs import free_port

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits, _Waiter
from mindio_tft_patch.processor.progress import ProgressBoard

pytestmark = pytest.mark.timeout(120)
SUPPORT = Path(__file__).parents[1] / "support"


class LateWork:
    """A collective that ends just after the time-out of a wait."""

    def __init__(self, failure: RuntimeError | None) -> None:
        self.failure = failure
        self.waits: list[timedelta | None] = []

    def _get_op_type(self) -> int:
        return 1

    def is_completed(self) -> bool:
        """It has ended meanwhile."""
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Time out at first; then say how it ended."""
        self.waits.append(timeout)
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.failure is not None:
            raise self.failure
        return True


@pytest.mark.parametrize("failure", [None, RuntimeError("Connection closed by peer")])
def test_a_collective_that_ends_just_after_a_time_out_has_ended_as_it_says(failure: RuntimeError | None) -> None:
    waits, work = InterruptibleWaits(StopFlag(), ProgressBoard()), LateWork(failure)
    if failure is None:
        assert waits._wait(work, LateWork.wait) is True
    else:
        with pytest.raises(RuntimeError, match="Connection closed by peer"):
            waits._wait(work, LateWork.wait)
    assert work.waits[-1] is None


def test_a_rank_that_waits_for_one_that_is_away_leaves_when_told_to() -> None:
    """In a process of its own, which ends without destroying groups that wait."""
    done = subprocess.run(
        [sys.executable, SUPPORT / "interrupted_waits.py"], stdout=subprocess.PIPE, timeout=50, check=True
    )
    outcomes = json.loads(done.stdout)
    assert {"reduce_scatter", "all_reduce", "receive"} <= set(outcomes)
    assert set(outcomes.values()) == {"Interrupted"}, outcomes


def test_a_helper_lets_go_of_what_it_has_waited_for() -> None:
    """A work keeps the connections of its communicator open, on which other ranks may wait for ever."""
    waiter, work = _Waiter(lambda work: True), LateWork(None)
    let_go = weakref.ref(work)
    done, result = waiter.submit(work)
    del work
    assert done.wait(10.0) and result == [True]
    deadline = time.monotonic() + 10.0
    while let_go() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert let_go() is None


def test_a_helper_that_is_left_ends_with_what_it_waits_for() -> None:
    may_end = threading.Event()
    waiter = _Waiter(lambda work: may_end.wait(10.0))
    waiter.submit(LateWork(None))
    waiter.leave()
    assert waiter._thread is not None and waiter._thread.is_alive()
    may_end.set()
    waiter._thread.join(10.0)
    assert not waiter._thread.is_alive()


def test_nothing_is_left_of_an_interrupted_ring_when_its_group_has_been_rebuilt() -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, SUPPORT / "interrupted_ring.py", str(rank), port], stdout=subprocess.PIPE)
        for rank in range(4)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0, 0, 0]
    for output in outputs:
        first, *others = json.loads(output)
        assert others == [first] * len(others)
