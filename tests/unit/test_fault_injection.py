"""The schedule of injected faults, and when each of them is due."""

from __future__ import annotations

import pytest

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import FaultInjector, PlannedFault, read_schedule


def injector(text: str, rank: int) -> tuple[FaultInjector, list[PlannedFault]]:
    """An injector that only notes what it would do."""
    done: list[PlannedFault] = []
    return FaultInjector(read_schedule(text), rank, {"sigkill": done.append, "slow": done.append}), done


def test_a_schedule_names_rank_step_moment_and_kind() -> None:
    first, second = read_schedule("rank=1, step=5, moment=forward, kind=sigkill; rank=0,step=2,moment=dump,kind=exit;")
    assert first == PlannedFault(rank=1, step=5, moment="forward", kind="sigkill")
    assert second == PlannedFault(rank=0, step=2, moment="dump", kind="exit")


def test_an_empty_schedule_is_no_fault() -> None:
    assert read_schedule("") == ()


@pytest.mark.parametrize(
    "text",
    [
        "rank=1,step=5,moment=forward",
        "rank=one,step=5,moment=forward,kind=exit",
        "rank=1,step=5,moment=lunch,kind=exit",
        "rank=1,step=5,moment=forward,kind=meteor",
        "rank=1,step=5,moment=forward,kind=exit,colour=red",
    ],
)
def test_nonsense_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(ConfigError, match="TFT_INJECT"):
        read_schedule(text)


def test_a_step_is_the_one_under_way_before_its_commit_and_the_complete_one_after() -> None:
    inject, done = injector("rank=0,step=5,moment=forward,kind=sigkill;rank=0,step=5,moment=between,kind=slow", 0)
    inject("forward", 3)
    inject("step_begin", 4)
    assert done == []
    inject("forward", 4)
    assert [fault.kind for fault in done] == ["sigkill"]
    inject("step_begin", 5)
    assert [fault.kind for fault in done] == ["sigkill", "slow"]


def test_other_ranks_are_left_alone() -> None:
    inject, done = injector("rank=1,step=1,moment=forward,kind=sigkill", 0)
    inject("forward", 0)
    assert done == []


def test_a_fault_comes_at_its_count_and_only_once() -> None:
    inject, done = injector("rank=0,step=1,moment=forward,kind=slow,count=2", 0)
    seen = []
    for _ in range(4):
        inject("forward", 0)
        seen.append(len(done))
    assert seen == [0, 1, 1, 1]


def test_minus_one_means_the_first_such_moment_of_any_step() -> None:
    inject, done = injector("rank=0,step=-1,moment=evaluate,kind=slow", 0)
    inject("evaluate_forward", 17)
    assert len(done) == 1


def test_a_delay_is_slept_before_the_fault() -> None:
    slept: list[float] = []
    faults = read_schedule("rank=0,step=1,moment=forward,kind=slow,delay=0.25")
    FaultInjector(faults, 0, {"slow": lambda fault: slept.append(-1.0)}, sleep=slept.append)("forward", 0)
    assert slept == [0.25, -1.0]
