"""The cluster manager lets the job hold between two steps, and go on."""

from __future__ import annotations

import msgspec
from support.control import DUMP_ONLY
from support.managed import ManagedJob

from mindio_tft_patch.controller.vocabulary import Code, FaultType
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

EVERYBODY = (0, 1, 2, 3)
OTHER = int(FaultType.OTHER)


def answer(job: ManagedJob, phase: Phase, steps: dict[int, int]) -> None:
    for rank, step in steps.items():
        job.done(phase, rank, step=step)


def held(**options: object) -> ManagedJob:
    """All ranks hold after step 7."""
    job = ManagedJob(**options)
    assert job.pauses(60).obeyed
    answer(job, Phase.PAUSE, {0: 6, 1: 7, 2: 6, 3: 6})
    answer(job, Phase.PAUSE, dict.fromkeys(EVERYBODY, 7))
    return job


def test_all_ranks_hold_at_the_highest_step_that_any_of_them_has_begun() -> None:
    job = ManagedJob()
    assert job.pauses(60).obeyed
    freeze = job.sent(Phase.PAUSE)
    assert set(freeze) == set(EVERYBODY) and freeze[0].plan.target_step == 0
    answer(job, Phase.PAUSE, {0: 6, 1: 7, 2: 6})
    assert job.sent(Phase.PAUSE)[0].plan.target_step == 0
    answer(job, Phase.PAUSE, {3: 6})
    hold = job.sent(Phase.PAUSE)
    assert {do.plan.target_step for do in hold.values()} == {7}
    assert hold[0].attempt == freeze[0].attempt + 1
    answer(job, Phase.PAUSE, {0: 7, 1: 7, 2: 7})
    assert job.told == []
    answer(job, Phase.PAUSE, {3: 7})
    assert [(int(one.code), dict(one.ranks)) for one in job.told_stopped] == [(Code.GOOD, {})]
    assert not job.machine.idle


def test_continue_lets_all_go_on_and_is_reported_when_all_have() -> None:
    job = held()
    assert job.chooses("continue").obeyed
    assert set(job.sent(Phase.RESUME)) == set(EVERYBODY)
    assert job.told_results == []
    job.done(Phase.RESUME, *EVERYBODY)
    assert job.told_results == [(Code.GOOD, "continue")]
    assert job.machine.idle and not job.chooses("continue").obeyed


def test_ranks_go_on_by_themselves_when_nothing_is_said_in_time() -> None:
    job = held()
    job.passes(59, beating=EVERYBODY, activity=Activity.PAUSE)
    assert job.sent(Phase.RESUME) == {}
    job.passes(1.1, beating=EVERYBODY, activity=Activity.PAUSE)
    job.done(Phase.RESUME, *EVERYBODY)
    assert job.told_results == [(Code.GOOD, "continue")] and job.machine.idle


def test_a_pause_without_a_time_lasts_as_long_as_the_manager_is_waited_for_elsewhere() -> None:
    job = ManagedJob(manager_seconds=10.0)
    job.pauses()
    for _ in range(2):
        answer(job, Phase.PAUSE, dict.fromkeys(EVERYBODY, 6))
    job.passes(9, beating=EVERYBODY)
    assert job.sent(Phase.RESUME) == {}
    job.passes(1.1, beating=EVERYBODY)
    assert set(job.sent(Phase.RESUME)) == set(EVERYBODY)


def test_a_job_that_only_saves_can_be_paused_too() -> None:
    assert held(strategies=DUMP_ONLY).chooses("continue").obeyed


def test_a_rank_that_cannot_hold_lets_all_go_on() -> None:
    job = ManagedJob()
    job.pauses(60)
    answer(job, Phase.PAUSE, dict.fromkeys(EVERYBODY, 6))
    job.failed(Phase.PAUSE, 2, "the device is broken")
    assert [int(one.code) for one in job.told_stopped] == [Code.ERROR]
    assert "rank 2 cannot hold: the device is broken" in job.told_stopped[0].text
    assert set(job.sent(Phase.RESUME)) == set(EVERYBODY) and job.machine.idle


def test_a_rank_that_does_not_answer_lets_all_go_on() -> None:
    job = ManagedJob()
    job.pauses(60)
    answer(job, Phase.PAUSE, {0: 6, 1: 6, 2: 6})
    job.passes(181, beating=EVERYBODY, activity=Activity.SAVE, step=0.5)
    assert [int(one.code) for one in job.told_stopped] == [Code.ERROR]
    assert "rank 3 did not hold within 180 s" in job.told_stopped[0].text
    assert job.machine.idle


def test_a_rank_that_does_not_go_on_is_reported() -> None:
    job = held()
    job.chooses("continue")
    job.done(Phase.RESUME, 0, 1, 2)
    job.passes(181, beating=EVERYBODY, activity=Activity.PAUSE, step=0.5)
    assert job.told_results == [(Code.EXIT_LEFT, "continue")] and job.machine.idle


def test_a_rank_that_has_reconnected_is_told_again() -> None:
    job = ManagedJob()
    job.pauses(60)
    answer(job, Phase.PAUSE, {0: 6, 1: 6, 2: 6})
    job.outbox.clear()
    job.say(3, job.machine.roster.ranks[3].registered)  # type: ignore[arg-type]
    job.say(0, job.machine.roster.ranks[0].registered)  # type: ignore[arg-type]
    assert set(job.sent(Phase.PAUSE)) == {3}


def test_a_rank_that_has_missed_the_word_to_go_on_is_told_again() -> None:
    job = held()
    job.chooses("continue")
    job.done(Phase.RESUME, *EVERYBODY)
    job.outbox.clear()
    job.beat(0, 1, 2)
    assert job.sent(Phase.RESUME) == {}
    job.beat(3, activity=Activity.PAUSE)
    assert set(job.sent(Phase.RESUME)) == {3}
    assert job.sent(Phase.RESUME)[3].attempt == job.machine.attempt


def test_a_new_controller_lets_ranks_go_on_that_an_old_one_has_told_to_hold() -> None:
    job = ManagedJob(attached=False)
    registered = job.machine.roster.ranks[3].registered
    assert registered is not None
    job.say(3, msgspec.structs.replace(registered, attempt=7))
    job.beat(3, activity=Activity.PAUSE)
    assert job.sent(Phase.RESUME)[3].attempt == 7


def test_holding_is_no_hang() -> None:
    job = held(hang_seconds=20.0)
    job.passes(50, beating=EVERYBODY, activity=Activity.PAUSE)
    assert not job.machine.idle and job.sent(Phase.STOP) == {}
    job.chooses("continue")
    job.done(Phase.RESUME, *EVERYBODY)
    job.passes(15, beating=EVERYBODY, waiting=15.0)
    assert job.machine.idle


def test_a_fault_while_all_hold_is_reported_and_recovered() -> None:
    job = held()
    job.reports(1, FaultKind.MEMORY)
    assert job.told_results == [] and len(job.told_stopped) == 1
    job.decides()
    assert job.told_faults == [{1: 0}]
    assert set(job.sent(Phase.STOP)) == set(EVERYBODY)


def test_a_fault_before_all_hold_ends_the_pause() -> None:
    job = ManagedJob()
    job.pauses(60)
    job.reports(1, FaultKind.MEMORY)
    assert [int(one.code) for one in job.told_stopped] == [Code.ERROR]
    answer(job, Phase.PAUSE, {2: 6})  # too late
    job.decides()
    assert set(job.sent(Phase.STOP)) == set(EVERYBODY)


def test_a_rank_that_falls_silent_while_all_hold_is_found() -> None:
    job = held()
    job.passes(7, beating=(0, 1, 2), activity=Activity.PAUSE)
    assert job.told_faults == [{3: OTHER}]


def test_a_rank_that_leaves_training_ends_the_pause() -> None:
    job = ManagedJob()
    job.pauses(60)
    job.finishes(2)
    assert [int(one.code) for one in job.told_stopped] == [Code.ERROR]
    assert set(job.sent(Phase.RESUME)) == {0, 1, 3} and job.machine.idle
    assert [int(one.code) for one in _pauses_again(job)] == [Code.ERROR]


def _pauses_again(job: ManagedJob) -> list[object]:
    job.outbox.clear()
    assert not job.pauses(60).obeyed
    return list(job.told_stopped)


def test_the_manager_may_stop_a_job_that_holds() -> None:
    job = held()
    assert job.stop({2: OTHER}).obeyed
    job.decides()
    job.done(Phase.STOP, 0, 1, 3)
    assert [int(one.code) for one in job.told_stopped] == [Code.GOOD, Code.GOOD]
    job.names({2: OTHER})
    job.chooses("recover")
    assert job.plan.strategy is Strategy.RESPAWN


def test_save_and_exit_ends_a_pause() -> None:
    job = held()
    job.saves_and_exits()
    job.decides()
    job.done(Phase.STOP, *EVERYBODY, step=7)
    assert (job.plan.strategy, job.plan.target_step) == (Strategy.DUMP, 7)


def test_a_pause_is_refused_when_something_else_is_going_on() -> None:
    job = held()
    assert not job.pauses(60).obeyed
    busy = ManagedJob()
    busy.reports(1, FaultKind.MEMORY)
    assert "a recovery is going on" in busy.pauses(60).reason
    assert [int(one.code) for one in busy.told_stopped] == [Code.WRONG_ORDER]
    early = ManagedJob(ready=(0, 1))
    assert "ranks 2, 3 did not finish the set-up" in early.pauses(60).reason
    assert [int(one.code) for one in early.told_stopped] == [Code.NOT_READY]
