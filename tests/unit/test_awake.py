"""Time in which the controller did not run does not count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindio_tft_patch.controller.awake import AwakeClock


@given(st.lists(st.floats(0.0, 1000.0), max_size=50), st.sampled_from((0.05, 1.0, 60.0)))
def test_it_never_goes_back_and_never_leaps(gaps: list[float], heartbeat_seconds: float) -> None:
    clock, now = AwakeClock(heartbeat_seconds), 5000.0
    before = clock.at(now)
    for gap in gaps:
        now += gap
        after = clock.at(now)
        assert -1e-6 <= after - before <= max(heartbeat_seconds, 0.25) + 1e-6
        before = after


def test_small_steps_count_in_full_and_a_late_controller_still_sees_time_pass() -> None:
    clock = AwakeClock(1.0)
    assert clock.at(10.0) == 10.0
    assert clock.at(10.9) == 10.9
    times = [clock.at(20.0 + 2 * i) for i in range(10)]
    assert times[-1] - times[0] == pytest.approx(4.5)
