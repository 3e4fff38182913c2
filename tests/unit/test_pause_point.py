"""The rank's side of a pause: who is ahead holds at once, who is behind goes on to where the others hold."""

from __future__ import annotations

import pytest

from mindio_tft_patch.errors import Interrupted
from mindio_tft_patch.processor.pause import PausePoint
from mindio_tft_patch.protocol.messages import CommitState, Do, Plan
from mindio_tft_patch.protocol.phases import Phase, Strategy


def pause(target: int = 0, attempt: int = 1) -> Do:
    return Do(attempt, Phase.PAUSE, Plan(Strategy.RETRY, "test", target_step=target))


def resume(attempt: int = 2) -> Do:
    return Do(attempt, Phase.RESUME, Plan(Strategy.RETRY, "test"))


def test_without_an_order_the_next_step_is_begun() -> None:
    point = PausePoint()
    assert point.forbidding(4) is None
    assert point.order(pause(), completed=4) == CommitState(5)


def test_between_two_steps_no_further_one_is_begun_until_it_is_known_where_to_hold() -> None:
    point = PausePoint()
    point.forbidding(4)
    assert point.order(pause(), completed=5) == CommitState(5)
    assert point.forbidding(5) is not None
    assert point.order(pause(6, attempt=2), completed=5) is None  # the main thread answers when it holds
    assert point.forbidding(5) is None  # another rank had begun step 6
    assert point.forbidding(6) is not None
    assert point.order(resume(), completed=6) == CommitState(6)
    assert point.forbidding(6) is None


def test_a_resume_of_a_recovery_is_none_of_its_business() -> None:
    point = PausePoint()
    assert point.concerns(pause()) and not point.concerns(resume(attempt=1))
    point.order(pause(attempt=1), completed=0)
    assert point.concerns(resume(attempt=1)) and point.concerns(resume(attempt=2))  # whichever was missed
    assert not point.concerns(Do(1, Phase.STOP, Plan(Strategy.RETRY, "")))


def test_stop_lets_a_thread_that_holds_leave_and_is_forgotten_by_one_that_does_not() -> None:
    point = PausePoint()
    point.order(pause(3), completed=3)
    order = point.forbidding(3)
    assert order is not None
    point.stop()
    with pytest.raises(Interrupted):
        point.wait(order, 5.0)
    assert point.forbidding(3) is None
    point.order(pause(9), completed=3)
    assert point.forbidding(3) is None  # goes on to step 9
    point.stop()
    assert point.forbidding(4) is None
