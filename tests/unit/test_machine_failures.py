"""What goes wrong while a recovery is going on."""

from __future__ import annotations

from support.control import Job

from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy


def test_a_rank_that_does_not_answer_stop_becomes_faulty() -> None:
    job = Job(dump_timeout_seconds=40)
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, 2)
    job.passes(17, beating=(0, 2, 3))
    assert job.machine.attempt == 2
    told = job.to_agent(Phase.STOP)
    assert told is not None and told.plan.faulty == (1, 3)
    # Ranks 1 and 3 hold one shard.
    job.done(Phase.STOP, 0, 2)
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.EXIT


def test_a_dump_that_never_ends_is_over_within_the_time_the_launcher_leaves() -> None:
    job = Job(dump_timeout_seconds=20)
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, 2, 3)
    job.done(Phase.CLEAN, 0, 2, 3)
    job.passes(19.6, beating=(0, 2, 3))
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.EXIT


def test_the_death_of_a_rank_that_writes_leads_to_a_new_dump_by_the_others() -> None:
    job = Job(world_size=8)
    job.dies(1)
    job.decides()
    alive = (0, 2, 3, 4, 5, 6, 7)
    job.done(Phase.STOP, *alive)
    job.done(Phase.CLEAN, *alive)
    job.done(Phase.DUMP, 0, detail="/half")
    job.dies(2)
    # The others notice: that is not their fault.
    job.failed(Phase.DUMP, 3, "connection closed")
    job.decides()
    assert job.machine.attempt == 2
    alive = (0, 3, 4, 5, 6, 7)
    assert tuple(job.sent(Phase.STOP)[3].plan.participants) == alive
    job.dumps(*alive)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.checkpoint == "/save/iter_0000005"


def test_a_failure_that_comes_before_the_death_that_caused_it_is_not_blamed() -> None:
    job = Job(world_size=8)
    job.dies(1)
    job.decides()
    alive = (0, 2, 3, 4, 5, 6, 7)
    job.done(Phase.STOP, *alive)
    job.done(Phase.CLEAN, *alive)
    job.failed(Phase.DUMP, 3, "connection closed")
    job.passes(0.2)
    job.dies(2)
    job.decides()
    assert 3 in job.sent(Phase.STOP)[0].plan.participants
    assert job.machine.attempt == 2


def test_a_failed_dump_is_tried_once_more_without_the_rank_that_failed() -> None:
    job = Job(world_size=8)
    job.dies(1)
    job.decides()
    alive = (0, 2, 3, 4, 5, 6, 7)
    job.done(Phase.STOP, *alive)
    job.done(Phase.CLEAN, *alive)
    job.failed(Phase.DUMP, 0, "No space left on device")
    job.passes(1.5, beating=alive)
    plan = job.sent(Phase.STOP)[2].plan
    assert plan.participants == (2, 3, 4, 5, 6, 7)
    assert plan.faulty == (1,)  # rank 0 is alive and well, it only cannot write
    assert 0 in job.sent(Phase.STOP)
    job.done(Phase.STOP, *plan.participants)
    job.done(Phase.CLEAN, *plan.participants)
    job.failed(Phase.DUMP, 2, "No space left on device")
    job.passes(1.5, beating=alive)
    job.done(Phase.STOP, *alive)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.strategy is Strategy.EXIT
    assert "No space left on device" in verdict.reason
    assert job.sent(Phase.EXIT).keys() == set(alive)


def test_no_dump_is_begun_when_the_time_that_the_launcher_leaves_is_over() -> None:
    job = Job(world_size=8, dump_timeout_seconds=20)
    job.dies(1)
    job.decides()
    alive = (0, 2, 3, 4, 5, 6, 7)
    job.done(Phase.STOP, *alive)
    job.done(Phase.CLEAN, *alive)
    job.passes(18.5, beating=alive)
    job.failed(Phase.DUMP, 0, "slow disk")
    job.passes(1.6, beating=alive)
    job.done(Phase.STOP, *alive)
    verdict = job.machine.verdict
    assert verdict is not None and "no dump: the 20 s of TTP_OT are over" in verdict.reason


def test_a_rank_that_fails_to_stop_does_not_hold_up_the_exit() -> None:
    job = Job(ready=(0, 1))
    job.dies(2)
    job.decides()
    job.failed(Phase.STOP, 0, "broken")
    job.done(Phase.STOP, 1)
    assert job.machine.verdict is not None
    assert job.machine.attempt == 1


def test_a_disk_full_for_a_rank_without_replica_ends_the_job_with_that_reason() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, 2, 3)
    job.done(Phase.CLEAN, 0, 2, 3)
    job.failed(Phase.DUMP, 3, "No space left on device")
    job.passes(1.5, beating=(0, 2, 3))
    job.done(Phase.STOP, 0, 2, 3)
    assert job.machine.verdict is not None and "No space left on device" in job.machine.verdict.reason


def test_a_rank_whose_clean_failed_is_not_used() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, 2, 3)
    job.failed(Phase.CLEAN, 0, "update failed")
    job.passes(1.5, beating=(0, 2, 3))
    assert job.sent(Phase.STOP)[2].plan.participants == (2, 3)


def test_answers_to_an_older_attempt_are_dropped() -> None:
    job = Job(world_size=8)
    job.dies(1)
    job.decides()
    job.dies(2)
    job.decides()
    assert job.machine.attempt == 2
    job.done(Phase.STOP, 0, 3, 4, 5, 6, 7, attempt=1)
    assert job.sent(Phase.CLEAN) == {}


def test_a_memory_fault_is_retried_in_place_when_every_rank_offers_it() -> None:
    job = Job(strategies=(Strategy.RETRY, Strategy.DUMP))
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    everybody = (0, 1, 2, 3)
    for phase in (Phase.STOP, Phase.CLEAN, Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK, Phase.RESUME):
        assert sorted(job.sent(phase)) == [0, 1, 2, 3], phase
        job.done(phase, *everybody)
    assert job.machine.idle and job.machine.verdict is None


def test_a_phase_of_a_retry_that_fails_falls_back_to_the_dump() -> None:
    job = Job(strategies=(Strategy.RETRY, Strategy.DUMP))
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.done(Phase.STOP, 0, 1, 2, 3)
    job.done(Phase.CLEAN, 0, 1, 2, 3)
    job.failed(Phase.REBUILD, 2, "not supported")
    job.passes(1.5, beating=(0, 1, 2, 3))
    plan = job.sent(Phase.STOP)[0].plan
    assert plan.strategy is Strategy.DUMP
    assert "no retry: rebuild failed on rank 2: not supported" in plan.reason


def test_a_worse_report_while_ranks_stop_changes_the_strategy() -> None:
    job = Job(strategies=(Strategy.RETRY, Strategy.DUMP))
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.reports(2, FaultKind.EXCEPTION, "ValueError")
    job.done(Phase.STOP, 0, 1, 2, 3)
    assert job.sent(Phase.STOP)[0].plan.strategy is Strategy.DUMP
