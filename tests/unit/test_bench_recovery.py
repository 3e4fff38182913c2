"""What the benchmark of recoveries makes of written steps, logs and schedules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from bench.recovery_log import COLLECT, REST, injections, phase_seconds, rebuild_seconds, records
from bench.schedule import MEMORY, NETWORK, faults, kills, rotated
from bench.step_log import Line, complete_steps, outcome_of, read_lines
from bench.summary import summarize
from bench.targets import TARGETS, verdict

from mindio_tft_patch.fault_injection import read_schedule


def steps(first: int, last: int, start: float, ranks: int = 4) -> Iterator[Line]:
    """Steps of one second each, all ranks at once."""
    for number in range(first, last + 1):
        began = start + number - first
        for rank in range(ranks):
            yield Line(rank, number, ranks, began, began + 1.0)


def test_lines_are_read_without_the_one_that_was_cut_off() -> None:
    assert read_lines("2 7 4 1.25 1.5\n2 8 4 1.5") == [Line(2, 7, 4, 1.25, 1.5)]
    assert read_lines("") == []


def test_a_step_is_complete_when_all_who_took_part_have_ended_it() -> None:
    lines = [Line(0, 1, 2, 0.0, 1.0), Line(1, 1, 2, 0.1, 1.2), Line(0, 2, 2, 1.2, 2.0)]
    (only,) = complete_steps(lines)
    assert (only.number, only.began, only.ended) == (1, 0.0, 1.2)


def test_a_recovery_that_keeps_every_step_loses_none() -> None:
    outcome = outcome_of([*steps(1, 5, start=0.0), *steps(6, 8, start=9.0)], fault=5.5)
    assert outcome.seconds == pytest.approx(10.0 - 5.5)
    assert outcome.caught_up_seconds == outcome.seconds
    assert (outcome.steps_lost, outcome.world_before, outcome.world_after) == (0, 4, 4)
    assert outcome.step_seconds == pytest.approx(1.0)


def test_a_restart_from_a_checkpoint_loses_the_steps_since_then() -> None:
    outcome = outcome_of([*steps(1, 15, start=0.0), *steps(11, 18, start=30.0)], fault=15.5)
    assert outcome.steps_lost == 5
    assert outcome.seconds == pytest.approx(31.0 - 15.5)
    assert outcome.caught_up_seconds == pytest.approx(36.0 - 15.5)


def test_work_that_is_never_caught_up_has_no_time_for_it() -> None:
    assert outcome_of([*steps(1, 15, start=0.0), *steps(11, 15, start=30.0)], fault=15.5).caught_up_seconds is None


def test_a_step_that_some_ranks_end_right_after_the_fault_is_one_before_it() -> None:
    lines = [*steps(1, 4, start=0.0)]
    lines = [line if line.rank == 2 or line.step < 4 else Line(line.rank, 4, 4, 3.0, 4.2) for line in lines]
    outcome = outcome_of([*lines, *steps(5, 6, start=7.0)], fault=4.1)
    assert (outcome.seconds, outcome.steps_lost) == (pytest.approx(8.0 - 4.1), 0)


def test_a_step_that_survivors_complete_without_the_lost_rank_is_not_complete() -> None:
    alone = [Line(rank, 5, 4, 4.0, 9.0) for rank in (0, 1, 3)]
    outcome = outcome_of([*steps(1, 4, start=0.0), *alone, *steps(6, 7, start=9.0)], fault=4.5)
    assert outcome.seconds == pytest.approx(10.0 - 4.5)


def test_a_step_that_was_under_way_and_goes_on_with_fewer_ranks_is_the_next_one() -> None:
    fewer = [Line(rank, 5, 3, 4.0, 9.0) for rank in (0, 1, 3)]
    outcome = outcome_of([*steps(1, 4, start=0.0), *fewer], fault=4.5)
    assert (outcome.seconds, outcome.world_before, outcome.world_after) == (pytest.approx(4.5), 4, 3)


@pytest.mark.parametrize(("first", "start", "when"), [(1, 0.0, "after"), (1, 9.0, "before")])
def test_a_fault_without_steps_on_both_sides_cannot_be_measured(first: int, start: float, when: str) -> None:
    with pytest.raises(ValueError, match=when):
        outcome_of(steps(first, 2, start), fault=5.0)


def test_the_phases_and_the_rest_make_up_the_whole() -> None:
    found = phase_seconds({"seconds": {"stop": 0.25, "return": 1.5}, "seconds_in_all": 2.0}, seconds=2.5)
    assert found == {COLLECT: 0.25, "stop": 0.25, "return": 1.5, REST: 0.5}


def test_logs_tell_recoveries_and_injections_in_order() -> None:
    log = [
        {"time": 3.0, "record": "recovery", "strategy": "retry"},
        {"time": 1.0, "record": "recovery", "strategy": "respawn"},
        {"time": 2.5, "injected": 1, "message": "injecting"},
        {"time": 0.5, "injected": 0, "message": "injecting"},
        {"time": 0.1, "message": "hello"},
    ]
    assert [record["strategy"] for record in records(log)] == ["respawn", "retry"]
    assert [(one.number, one.time) for one in injections(log)] == [(0, 0.5), (1, 2.5)]


def test_a_rebuild_takes_as_long_as_its_slowest_rank() -> None:
    messages = [(1, "31 process groups rebuilt in 0.250 s"), (1, "31 process groups rebuilt in 0.375 s")]
    messages += [(2, "31 process groups rebuilt in 0.125 s"), (2, "phase rebuild done in 9.000 s")]
    log = [{"attempt": attempt, "message": message} for attempt, message in messages]
    assert rebuild_seconds(log) == [0.375, 0.125]


@pytest.mark.parametrize("rounds", [1, 3, 5])
def test_kills_are_spread_over_the_steps_between_two_checkpoints_and_spare_rank_0(rounds: int) -> None:
    found = kills(rounds, first=11, last=18, ranks=4)
    assert found == kills(rounds, first=11, last=18, ranks=4)
    assert len(found) == rounds
    assert all(11 <= kill.step <= 18 and 1 <= kill.rank <= 3 and 0 <= kill.fraction <= 1 for kill in found)
    assert len({kill.step for kill in found}) == rounds
    assert len({kill.rank for kill in found}) == min(rounds, 3)


def test_everybody_is_first_in_turn() -> None:
    assert [rotated(number, ["a", "b", "c"])[0] for number in range(4)] == ["a", "b", "c", "a"]
    assert sorted(rotated(2, ["a", "b", "c"])) == ["a", "b", "c"]


@pytest.mark.parametrize("job", [0, 1, 2])
def test_the_schedule_of_faults_is_one_that_the_injector_reads(job: int) -> None:
    text, expected = faults(job, ranks=4)
    schedule = read_schedule(text)
    assert [fault.kind for fault in schedule] == expected
    assert sorted(expected) == [NETWORK] * 3 + [MEMORY] * 3
    assert all(fault.rank in range(4) and fault.moment in ("forward", "backward") for fault in schedule)
    # What a job needs for a median step between two faults, and after the last one.
    places = [fault.step for fault in schedule]
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(places))


@pytest.mark.parametrize(
    ("name", "values", "word"),
    [
        ("mttr_seconds.ours_standby", [2.0, 2.5, 2.9], "met: < 3.00 s"),
        ("mttr_seconds.ours_standby", [2.0, 2.5, 3.9], "open: < 3.00 s"),
        ("mttr_seconds.ours_standby", [3.1, 3.5, 3.9], "missed: < 3.00 s"),
        ("torchrun_vs.ours_standby", [8.1, 9.0, 12.0], "met: > 8.00 x"),
        ("torchrun_vs.ours_standby", [7.0, 9.0, 12.0], "open: > 8.00 x"),
        ("torchrun_vs.ours_standby", [5.0, 6.0, 7.0], "missed: > 8.00 x"),
    ],
)
def test_a_target_is_met_or_missed_only_when_the_whole_interval_says_so(
    name: str, values: list[float], word: str
) -> None:
    unit = "ratio" if TARGETS[name].least else "s"
    assert word in verdict(name, summarize(values, unit))


def test_what_has_no_target_has_no_verdict() -> None:
    assert verdict("gate_seconds", summarize([1.0], "s")) == ""
