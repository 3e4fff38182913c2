"""What a drill makes of firings, recovery records and training logs."""

from __future__ import annotations

import json

from support.drill import FAULT, ITERATION, dump, fired, lines, record, report, run

from mindio_tft_patch.launch.drill.findings import (
    Report,
    Run,
    Verdict,
    compare,
    read_line,
    read_log,
    recoveries_of,
)


def verdicts(made: Report) -> list[Verdict]:
    return [outcome.verdict for outcome in made.outcomes]


def test_a_line_of_the_training_log_is_kept_without_its_times() -> None:
    line = read_line(ITERATION, 7.0)
    assert line is not None and (line.step, line.seconds) == (5, 7.0)
    assert "lm loss: 5.412345E+00" in line.text and "elapsed" not in line.text and "2026" not in line.text
    assert read_line("iteration 5/ 20 | something else", 7.0) is None
    assert read_line("saving checkpoint at iteration 5", 7.0) is None


def test_a_log_is_read_by_time_and_without_what_is_cut_off() -> None:
    later, earlier = json.dumps({"time": 2.0, "message": "b"}), json.dumps({"time": 1.0, "message": "a"})
    assert [fields["message"] for fields in read_log([later, earlier, '{"time": 3.0, "mess', "[1]", ""])] == ["a", "b"]


def test_a_recovery_begins_its_seconds_before_its_record() -> None:
    first, second = recoveries_of([record(), record(time=1050.0, attempts=4, recomputed_steps=2)])
    assert (round(first.began, 3), first.ended, first.attempts) == (999.343, 1000.0, 1)
    assert (second.attempts, second.recomputed_steps, second.ranks) == (4, 2, frozenset({1}))


def test_replicas_are_equal_when_every_rank_that_looked_says_so() -> None:
    def told(*said: bool) -> bool | None:
        log = [{"time": 999.9, "verified": one} for one in said]
        return recoveries_of([*log, record()])[0].replicas_equal

    assert told() is None
    assert told(True, True) is True
    assert told(True, False) is False
    assert recoveries_of([record(replicas_equal=False)])[0].replicas_equal is False


def test_what_other_recoveries_have_verified_does_not_count() -> None:
    log = [{"time": 950.0, "verified": False}, record()]
    assert recoveries_of(log)[0].replicas_equal is None


def test_a_fault_that_was_repaired_in_place_is_good() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(record(), seen=lines(4, 5, 6)))
    assert verdicts(made) == [Verdict.IN_PLACE]
    assert made.problems() == []
    assert made.summary()[:2] == [
        "1 fault of 1 planned happened to the job on purpose.",
        "Of these, 1 was repaired while the job stayed up.",
    ]


def test_a_dump_ends_the_job_as_documented() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(dump(), code=1))
    assert verdicts(made) == [Verdict.SAVED]
    assert made.problems() == []


def test_an_exit_is_not_good() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(record(strategy="exit", step=0), code=1))
    assert verdicts(made) == [Verdict.LOST]
    assert made.problems() == ["fault 1: not saved", "the job ended with exit code 1"]


def test_a_fault_that_has_not_happened_is_told_with_the_likely_cause() -> None:
    two = f"{FAULT};rank=2,step=9,moment=forward,kind=exit"
    (problem,) = report(two, [fired(0, 999.3)], run(dump(), code=1)).problems()
    assert problem.startswith("fault 2 has not happened: the job had ended before")
    (problem,) = report(FAULT, [], run()).problems()
    assert "never came to that moment" in problem


def test_a_dump_of_an_older_step_is_not_called_one_of_the_last() -> None:
    flip = "rank=1,step=14,moment=after_update,kind=bit_flip"
    corrupt = [{"rank": rank, "kind": "corruption", "detail": ""} for rank in (0, 1)]
    made = report(flip, [fired(0, 999.0)], run(dump(fault=corrupt, step=12, recomputed_steps=6), code=1))
    assert verdicts(made) == [Verdict.SAVED] and made.problems() == []
    said = " ".join(made.summary())
    assert "saving the last completed step" not in said
    assert "saving the last step that could be trusted" in said and "6 completed steps" in said
    two = report(f"{FAULT};{flip}", [fired(0, 950.0), fired(1, 999.0)], run(dump(time=951.0), dump(), code=1))
    assert "2 were answered by saving the last completed step" in " ".join(two.summary())


REQUEST = [{"rank": None, "kind": "terminated", "detail": "the launcher of node 0 received SIGTERM"}]


def test_a_job_that_somebody_has_ended_was_not_ended_by_a_fault() -> None:
    slow = "rank=1,step=2,moment=forward,kind=slow"
    made = report(slow, [fired(0, 990.0, 1)], run(dump(fault=REQUEST, reason="dump after the job"), code=1))
    assert verdicts(made) == [Verdict.UNHARMED]
    assert made.problems() == [
        "the job ended with exit code 1, for which no fault of the schedule accounts: dump after the job"
    ]


def test_every_run_must_have_ended_by_a_fault_or_well() -> None:
    first, second = Run(900.0, 1000.0, 1, (), (dump(time=950.0),)), Run(1001.0, 1100.0, 1, (), ())
    assert report(FAULT, [fired(0, 949.0)], first, second).problems() == [
        "run 2 ended with exit code 1, for which no fault of the schedule accounts"
    ]
    before = Run(800.0, 899.0, 1, (), ())
    assert report(FAULT, [fired(0, 949.0)], before, first).problems() == [
        "run 1 ended with exit code 1, for which no fault of the schedule accounts"
    ]


def test_a_slow_rank_that_nobody_minded_is_no_part_of_a_later_recovery() -> None:
    two = f"rank=1,step=2,moment=forward,kind=slow;{FAULT}"
    made = report(two, [fired(0, 990.0, 1), fired(1, 999.3)], run(record(), seen=lines(1, 2, 3, 4, 5, 6)))
    assert verdicts(made) == [Verdict.UNHARMED, Verdict.IN_PLACE]


def test_a_second_fault_within_a_recovery_belongs_to_it() -> None:
    two = f"{FAULT};rank=2,step=4,moment=rebuild,kind=sigkill"
    made = report(two, [fired(0, 999.3), fired(1, 999.7)], run(record()))
    assert [outcome.recovery for outcome in made.outcomes] == [made.recoveries[0]] * 2


def test_two_ranks_that_die_together_are_one_recovery() -> None:
    two = f"{FAULT};rank=2,step=5,moment=forward,kind=sigkill"
    both = [{"rank": rank, "kind": "process_death", "detail": ""} for rank in (1, 2)]
    made = report(two, [fired(0, 999.30), fired(1, 999.31)], run(record(fault=both, ranks=[1, 2])))
    assert verdicts(made) == [Verdict.IN_PLACE, Verdict.IN_PLACE]


def test_a_job_that_ended_without_a_word_has_not_survived() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(code=1, seen=lines(3, 4, 5, began=996.0)))
    assert verdicts(made) == [Verdict.LOST]


def test_replicas_that_differ_are_a_problem() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(record(replicas_equal=False)))
    assert made.problems() == ["after the recovery at step 4 the replicas differ"]


def test_a_job_that_was_ended_for_being_late_is_a_problem() -> None:
    late = Run(900.0, 1100.0, -15, (), (record(),), timed_out=True)
    assert report(FAULT, [fired(0, 999.3)], late).problems() == ["the job did not end within --limit and was ended"]


def test_equal_logs_are_equal() -> None:
    found = compare(run(seen=lines(1, 2, 3)), [run(seen=lines(1, 2, 3))])
    assert (found.equal, found.different, found.missing, found.repeated) == (3, (), (), ())


def test_a_digit_a_gap_and_a_repetition_are_told() -> None:
    other = (*lines(1), *lines(2, text="lost"), *lines(4, 4))
    found = compare(run(seen=lines(1, 2, 3, 4)), [run(seen=other)])
    assert (found.different, found.missing, found.repeated) == ((2,), (3,), (4,))
    problems = report(FAULT, [fired(0, 999.3)], run(record()), comparison=found).problems()
    assert len(problems) == 3


def test_a_step_that_was_saved_before_it_was_printed_is_not_missing() -> None:
    expected = run(seen=lines(1, 2, 3, 4, 5, 6))
    broken, resumed = run(dump(), code=1, seen=lines(1, 2, 3)), run(seen=lines(5, 6))
    assert compare(expected, [broken, resumed]).missing == ()
    assert compare(expected, [run(seen=lines(1, 2, 3)), resumed]).missing == (4,)


def test_after_a_dump_only_what_came_before_it_is_compared() -> None:
    found = compare(run(seen=lines(1, 2, 3, 4, 5, 6)), [run(dump(), code=1, seen=lines(1, 2, 3))])
    assert (found.equal, found.missing) == (3, ())


def test_a_comparison_of_nothing_is_a_problem() -> None:
    made = report(FAULT, [fired(0, 999.3)], run(record()), comparison=compare(run(), [run()]))
    assert "no losses could be compared" in made.problems()[0]
