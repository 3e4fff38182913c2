"""The schedule of injected faults, and when each of them is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import (
    FaultInjector,
    NotInjectedError,
    PlannedFault,
    kinds,
    known_kinds,
    read_schedule,
)
from mindio_tft_patch.fired_faults import FiredFaults


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


def process(
    text: str, fired: FiredFaults | None, *, returning: bool = False
) -> tuple[FaultInjector, list[PlannedFault]]:
    """One process of rank 0."""
    done: list[PlannedFault] = []
    return FaultInjector(
        read_schedule(text), 0, {"sigkill": done.append}, replaces=lambda: returning, fired=fired
    ), done


FORWARD = "rank=0,step=1,moment=forward,kind=sigkill"


def test_the_process_that_takes_the_place_of_a_killed_one_is_not_killed_by_the_same_entry(tmp_path: Path) -> None:
    fired = FiredFaults(tmp_path / "new")
    first, done = process(FORWARD, fired)
    first("forward", 0)
    assert len(done) == 1
    second, done = process(FORWARD, fired, returning=True)
    second("forward", 0)
    assert done == []


def test_an_entry_that_has_not_happened_yet_happens_to_the_new_process(tmp_path: Path) -> None:
    inject, done = process(FORWARD, FiredFaults(tmp_path), returning=True)
    inject("forward", 0)
    assert len(done) == 1


def test_without_a_memory_a_returning_process_keeps_to_what_is_meant_for_it() -> None:
    inject, done = process(f"{FORWARD};rank=0,step=-1,moment=setup,kind=sigkill,returned=1", None, returning=True)
    inject("forward", 0)
    inject("setup", 0)
    assert [fault.moment for fault in done] == ["setup"]


def test_what_is_meant_for_a_returning_process_leaves_the_first_one_alone(tmp_path: Path) -> None:
    inject, done = process(f"{FORWARD},returned=1", FiredFaults(tmp_path))
    inject("forward", 0)
    assert done == []


def test_times_counts_over_all_processes_of_the_rank(tmp_path: Path) -> None:
    happened = 0
    for returning in (False, True, True):
        inject, done = process(f"{FORWARD},times=2", FiredFaults(tmp_path), returning=returning)
        inject("forward", 0)
        happened += len(done)
    assert happened == 2


def test_times_counts_within_a_process_too() -> None:
    inject, done = injector("rank=0,step=1,moment=forward,kind=slow,times=2", 0)
    for _ in range(3):
        inject("forward", 0)
    assert len(done) == 2


def test_what_has_happened_can_be_read(tmp_path: Path) -> None:
    fired = FiredFaults(tmp_path, clock=lambda: 77.0)
    assert fired.read() == []
    assert fired.claim(3, FORWARD, completed=4)
    assert not fired.claim(3, FORWARD, completed=4)
    (firing,) = fired.read()
    assert (firing.number, firing.words, firing.completed, firing.time) == (3, FORWARD, 4, 77.0)
    (tmp_path / "4.0").write_text('{"number"')
    assert len(fired.read()) == 1


def test_an_entry_in_words_is_the_entry() -> None:
    text = "rank=1,step=-1,moment=rebuild,kind=memory_moments,count=2,delay=0.5,returned=1"
    (fault,) = read_schedule(text)
    assert fault.words() == text


def test_a_phase_of_a_recovery_is_a_moment() -> None:
    inject, done = injector("rank=0,step=4,moment=repair,kind=sigkill", 0)
    inject("phase_rebuild", 4)
    inject("phase_repair", 4)
    assert len(done) == 1


def test_a_kind_that_nobody_can_do_is_refused_where_it_would_happen() -> None:
    schedule = read_schedule("rank=0,step=1,moment=forward,kind=memory_moments")
    assert "memory_moments" in known_kinds() and "memory_moments" not in kinds()
    FaultInjector(schedule, rank=1)
    with pytest.raises(ConfigError, match="memory_moments"):
        FaultInjector(schedule, rank=0)


def test_a_fault_that_could_not_be_done_is_told_and_has_not_happened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fault: PlannedFault) -> None:
        raise NotInjectedError("there is nothing to overwrite")

    fired = FiredFaults(tmp_path)
    schedule = read_schedule(f"{FORWARD};rank=0,step=1,moment=forward,kind=slow")
    FaultInjector(schedule, 0, {"sigkill": refuse, "slow": lambda fault: None}, fired=fired)("forward", 0)
    assert [firing.number for firing in fired.read()] == [1]
    assert f"the fault was not injected: {FORWARD}: there is nothing to overwrite" in caplog.text


def test_only_the_last_claim_of_this_process_is_withdrawn(tmp_path: Path) -> None:
    times = iter([1.0, 2.0])
    fired = FiredFaults(tmp_path, clock=lambda: next(times))
    fired.withdraw(0)
    assert fired.claim(0, "", 1, times=2) and fired.claim(0, "", 2, times=2)
    fired.withdraw(1)
    fired.withdraw(0)
    assert [firing.completed for firing in fired.read()] == [1]
