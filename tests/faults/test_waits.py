"""Waits for collectives on gloo: every kind of them ends when the controller says stop."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.device.stop_flag import StopFlag
from mindio_tft_patch.adaptors.device.waits import InterruptibleWaits
from mindio_tft_patch.processor.progress import ProgressBoard

pytestmark = pytest.mark.timeout(60)


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
    script = Path(__file__).parents[1] / "support" / "interrupted_waits.py"
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, timeout=50, check=True)
    outcomes = json.loads(done.stdout)
    assert {"reduce_scatter", "all_reduce", "receive"} <= set(outcomes)
    assert set(outcomes.values()) == {"Interrupted"}, outcomes
