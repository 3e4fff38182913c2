"""A process is lost, another takes its place, and the job stays up."""

from __future__ import annotations

import pytest
from support.control import AFTER_CLEAN, EVERYTHING, Job

from mindio_tft_patch.controller.events import Received, agent, processor
from mindio_tft_patch.protocol.messages import FaultReport
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

EVERYBODY = (0, 1, 2, 3)


def make(**options: object) -> Job:
    return Job(strategies=EVERYTHING, **options)  # type: ignore[arg-type]


def lose_one(job: Job, rank: int = 1) -> tuple[int, ...]:
    """One rank dies, the others stop and clean; the job waits for it."""
    survivors = tuple(other for other in EVERYBODY if other != rank)
    job.dies(rank)
    job.decides()
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    return survivors


def test_a_dead_rank_is_ordered_waited_for_and_taken_in_again() -> None:
    job = make()
    job.dies(1)
    job.decides()
    stop = job.sent(Phase.STOP)
    assert (stop[0].plan.strategy, stop[0].plan.lost, stop[0].plan.participants) == (Strategy.RESPAWN, (1,), (0, 2, 3))
    told = job.to_agent(Phase.STOP)
    assert told is not None and told.plan.lost == (1,)
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2, 3))
    assert job.sent(Phase.REBUILD) == {}
    assert "waiting for rank 1 to come back" in job.log
    job.passes(4, beating=(0, 2, 3))
    assert job.registers_again(1).returning
    assert job.sent(Phase.REBUILD) == {}
    job.gets_ready(1)
    plan = job.sent(Phase.REBUILD)[1].plan
    assert (plan.participants, plan.faulty, plan.lost, plan.target_step) == (EVERYBODY, (1,), (1,), 5)
    assert [source.source for source in plan.sources] == [0, 3]
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle and job.machine.verdict is None
    record = job.record
    assert (record["strategy"], record["step"], record["restarted"], record["attempts"]) == ("respawn", 5, [1], 1)
    assert record["budget_left"] == 99
    assert record["seconds"]["return"] == pytest.approx(4, abs=0.01)  # type: ignore[index]


def test_two_ranks_are_ordered_together_while_a_copy_of_each_shard_lives() -> None:
    job = make()
    job.dies(1)
    job.dies(2)
    job.decides()
    assert job.plan.lost == (1, 2)
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 3))
    job.comes_back(2)
    assert job.sent(Phase.REBUILD) == {}
    job.comes_back(1)
    assert sorted(job.sent(Phase.REBUILD)) == [0, 1, 2, 3]
    assert [source.source for source in job.plan.sources] == [0, 3]


def test_a_rank_that_is_back_before_the_others_have_stopped_is_not_told_to_stop() -> None:
    job = make()
    job.dies(1)
    job.decides()
    job.comes_back(1)
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2, 3))
    assert 1 not in job.sent(Phase.STOP) and 1 not in job.sent(Phase.CLEAN)
    assert sorted(job.sent(Phase.REBUILD)) == [0, 1, 2, 3]


def test_what_a_returned_rank_says_about_its_step_does_not_count() -> None:
    job = make()
    lose_one(job)
    job.comes_back(1)
    job.dies(2)
    job.decides()
    assert 1 in job.sent(Phase.STOP)
    job.done(Phase.STOP, 1, step=0)
    job.done(Phase.STOP, 0, 3)
    assert job.plan.target_step == 5


def test_everything_is_forgotten_after_a_recovery() -> None:
    job = make()
    lose_one(job)
    job.comes_back(1)
    job.walks(*AFTER_CLEAN)
    assert not job.machine.welcome(processor(1)).returning
    lose_one(job, rank=2)
    plan = job.sent(Phase.CLEAN)[1].plan
    assert (plan.lost, plan.faulty, plan.participants) == ((2,), (2,), (0, 1, 3))


@pytest.mark.parametrize("phase", [Phase.STOP, Phase.CLEAN, *AFTER_CLEAN])
def test_a_second_death_in_any_phase_begins_a_new_attempt_that_orders_that_rank_only(phase: Phase) -> None:
    job = make(world_size=8)
    job.dies(1)
    job.decides()
    survivors = (0, 2, 3, 4, 5, 6, 7)
    if phase is not Phase.STOP:
        job.walks(Phase.STOP, ranks=survivors)
    if phase in AFTER_CLEAN:
        job.walks(Phase.CLEAN, ranks=survivors)
        job.comes_back(1)
        job.walks(*AFTER_CLEAN[: AFTER_CLEAN.index(phase)], ranks=tuple(range(8)))
    assert job.sent(phase)
    job.dies(2)
    job.decides()
    assert job.machine.attempt == 2
    assert (job.plan.strategy, job.plan.lost, job.plan.faulty) == (Strategy.RESPAWN, (2,), (1, 2))
    back = (1,) if phase in AFTER_CLEAN else ()
    job.walks(Phase.STOP, ranks=(0, 3, 4, 5, 6, 7, *back))
    job.walks(Phase.CLEAN, ranks=(0, 3, 4, 5, 6, 7))
    job.comes_back(*({1, 2} - set(back)))
    job.walks(*AFTER_CLEAN, ranks=tuple(range(8)))
    assert job.machine.idle
    assert job.record["restarted"] == [1, 2]
    assert job.record["attempts"] == 2


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("ready", [False, True])
def test_a_replacement_that_dies_is_ordered_once_more(registered: bool, ready: bool) -> None:
    job = make()
    survivors = lose_one(job)
    if registered:
        job.registers_again(1)
    if ready:
        job.comes_back(1)
    job.dies(1, "signal 9, again")
    job.decides()
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (1,))
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    job.comes_back(1)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle


def test_a_replacement_that_always_dies_leads_to_the_dump_after_a_few_tries() -> None:
    job = make()
    survivors = lose_one(job)
    for _ in range(3):
        job.dies(1, "exit code 1")
        job.decides()
        job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    assert job.plan.strategy is Strategy.DUMP
    assert "rank 1 was started anew 3 times and was lost each time" in job.plan.reason
    job.done(Phase.DUMP, *survivors, detail="/save/5")
    assert job.machine.verdict is not None and job.machine.verdict.step == 5


def test_an_exception_in_the_set_up_of_a_replacement_is_a_failed_start_and_no_fault_of_training() -> None:
    job = make()
    lose_one(job)
    job.registers_again(1)
    job.reports(1, FaultKind.EXCEPTION, "ImportError")
    job.decides()
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (1,))


def test_the_death_of_the_old_process_that_crosses_the_order_is_no_second_fault() -> None:
    job = make()
    job.reports(1, FaultKind.HANG, "stuck")
    job.decides()
    assert job.plan.lost == (1,)
    job.feed(Received(agent(0), FaultReport(1, FaultKind.PROCESS_DEATH, "signal 9", pid=101)))
    job.decides()
    assert job.machine.attempt == 1
    job.feed(Received(agent(0), FaultReport(1, FaultKind.PROCESS_DEATH, "signal 9", pid=555)))
    job.decides()
    assert job.machine.attempt == 2


def test_what_is_left_of_a_hung_process_is_not_listened_to() -> None:
    job = make()
    job.reports(1, FaultKind.HANG)
    job.decides()
    job.reports(1, FaultKind.EXCEPTION, "woke up")
    job.gets_ready(1)
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2, 3))
    assert job.sent(Phase.REBUILD) == {}


def test_a_rank_that_does_not_come_back_in_time_leads_to_the_dump_with_that_reason() -> None:
    job = make(return_seconds=30)
    survivors = lose_one(job)
    job.passes(31, beating=survivors)
    assert job.plan.strategy is Strategy.DUMP
    assert "no respawn: rank 1 did not come back within 30 s" in job.plan.reason
    assert "no reload: rank 1 did not come back within 30 s" in job.plan.reason
    job.dumps(*survivors)
    assert job.machine.verdict is not None and job.machine.verdict.checkpoint
    assert job.record["seconds"]["return"] >= 30  # type: ignore[index,operator]


def test_a_returned_rank_is_never_saved_from_before_the_recovery_has_succeeded() -> None:
    job = make()
    lose_one(job)
    job.comes_back(1)
    job.reports(2, FaultKind.EXCEPTION, "ValueError")
    job.decides()
    assert (job.plan.strategy, job.plan.participants, job.plan.faulty) == (Strategy.DUMP, (0, 2, 3), (1,))
    job.dumps(0, 2, 3)
    assert 1 in job.sent(Phase.EXIT)


def test_a_replacement_that_goes_silent_in_its_set_up_is_ordered_once_more() -> None:
    job = make()
    survivors = lose_one(job)
    job.registers_again(1)
    job.passes(30, beating=(*survivors, 1))
    assert job.machine.attempt == 1
    job.passes(50, beating=survivors)
    assert (job.machine.attempt, job.plan.lost) == (2, (1,))


def test_a_survivor_that_goes_silent_while_the_others_wait_is_ordered_too() -> None:
    job = make()
    lose_one(job)
    job.passes(50, beating=(0, 3))
    assert (job.machine.attempt, job.plan.lost, job.plan.faulty) == (2, (2,), (1, 2))


def test_an_answer_to_an_attempt_that_was_given_up_is_dropped() -> None:
    job = make()
    lose_one(job)
    job.comes_back(1)
    job.dies(2)
    job.decides()
    job.done(Phase.REBUILD, 0, 1, 3, attempt=1)
    job.done(Phase.STOP, 0, 1, 3, attempt=1)
    assert job.sent(Phase.CLEAN)[0].attempt == 1


def test_a_rank_that_is_lost_is_not_respawned_when_no_copy_of_its_shard_is_left() -> None:
    job = make()
    job.dies(1)
    job.dies(3)
    job.decides()
    assert job.plan.strategy is Strategy.RELOAD
    assert "no respawn: no usable copy of the dense optimizer shard of ranks 1, 3" in job.plan.reason


def test_the_only_copy_of_a_shard_is_still_missed_when_its_process_has_come_back() -> None:
    job = make()
    job.dies(1)
    job.dies(3)
    job.comes_back(1, 3)
    job.decides()
    assert job.plan.strategy is Strategy.RELOAD
    assert (job.plan.lost, job.plan.faulty) == ((), (1, 3))


def test_a_process_started_by_hand_in_place_of_one_that_nobody_missed_yet_is_taken_in() -> None:
    job = make(with_agent=False)
    job.passes(5, beating=(0, 2, 3))
    assert job.registers_again(1).returning
    job.gets_ready(1)
    job.decides()
    job.passes(1, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.lost, job.plan.faulty) == (Strategy.RESPAWN, (), (1,))


def test_a_rank_that_has_left_training_cannot_be_recovered_in_place_any_more() -> None:
    job = make()
    job.gets_ready(2, (Strategy.DUMP,))
    job.dies(1)
    job.decides()
    assert job.plan.strategy is Strategy.DUMP
    job = make()
    job.finishes(2)
    job.dies(1)
    job.decides()
    assert job.plan.strategy is Strategy.DUMP
    assert "no respawn: rank 2 has left training" in job.plan.reason


def test_a_fault_when_training_is_over_does_not_sound_like_a_loss() -> None:
    job = make()
    job.finishes(0)
    job.finishes(2)
    job.dies(1)
    job.decides()
    assert job.plan.strategy is Strategy.EXIT
    assert "training was over: ranks 0, 2 had left it in good order" in job.plan.reason


def resumes_after_the_last_step(*resumed: int) -> Job:
    job = make()
    lose_one(job)
    job.comes_back(1)
    job.walks(Phase.REBUILD, Phase.REPAIR, Phase.ROLLBACK)
    job.done(Phase.RESUME, *resumed)
    job.finishes(1)
    return job


def test_a_rank_that_resumes_and_has_no_step_left_may_leave_before_the_others_have_resumed() -> None:
    job = resumes_after_the_last_step(0, 1)
    job.finishes(0)
    job.passes(0.5, beating=(2, 3))
    job.done(Phase.RESUME, 2, 3)
    job.finishes(2)
    job.finishes(3)
    assert (job.record["strategy"], job.record["restarted"]) == ("respawn", [1])
    assert "given up" not in job.log
    job.passes(5)
    assert not job.sent(Phase.EXIT)


def test_a_rank_that_is_lost_while_others_leave_is_not_brought_back() -> None:
    job = resumes_after_the_last_step(0, 1)
    job.dies(2)
    job.decides()
    assert job.plan.strategy in {Strategy.DUMP, Strategy.EXIT}
    assert "no respawn: rank 1 has left training" in job.plan.reason


def test_a_rank_that_leaves_before_it_has_resumed_ends_the_attempt() -> None:
    job = resumes_after_the_last_step(0)
    job.decides()
    assert "attempt 1 is given up: rank 1 has left training" in job.log


def test_a_rank_that_withdraws_its_offer_ends_the_attempt() -> None:
    job = make()
    survivors = lose_one(job)
    job.gets_ready(2, (Strategy.DUMP,))
    job.decides()
    assert (job.plan.strategy, job.plan.participants) == (Strategy.DUMP, survivors)


def test_a_request_to_end_while_a_rank_comes_back_saves_and_ends() -> None:
    job = make()
    survivors = lose_one(job)
    job.terminate()
    job.decides()
    assert (job.plan.strategy, job.plan.participants) == (Strategy.DUMP, survivors)


# A whole node.


def lose_node() -> Job:
    """Node 1 has ranks 2 and 3; one copy of each shard lives on node 0."""
    job = make(nodes=2)
    job.beat(*EVERYBODY)
    job.dark.add(1)
    job.passes(5, beating=(0, 1), waiting=4.0)
    return job


def test_a_lost_node_is_waited_for_and_taken_in_when_its_launcher_is_started_again() -> None:
    job = lose_node()
    assert (job.plan.strategy, job.plan.faulty, job.plan.lost) == (Strategy.RESPAWN, (2, 3), ())
    assert "waiting up to 300 s for the launcher of node 1 to be started again" in job.plan.reason
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1))
    job.passes(20, beating=(0, 1))
    job.launches(1)
    assert job.machine.welcome(agent(1)).returning
    job.comes_back(2, 3)
    assert sorted(job.sent(Phase.REBUILD)) == [0, 1, 2, 3]
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle and job.machine.attempt == 1
    assert not job.machine.welcome(agent(1)).returning
    assert job.record["restarted"] == [2, 3]


def test_a_lost_node_that_does_not_come_back_leads_to_the_dump() -> None:
    job = lose_node()
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1))
    job.passes(301, beating=(0, 1), step=0.5)  # type: ignore[arg-type]
    assert job.plan.strategy is Strategy.DUMP
    assert "ranks 2, 3 did not come back within 300 s" in job.plan.reason


def test_a_node_that_was_only_out_of_reach_goes_on_with_the_processes_that_it_has() -> None:
    job = lose_node()
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1))
    job.dark.clear()
    job.beat(2, 3)
    job.passes(0.5, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.faulty) == (Strategy.RETRY, ())
    assert job.plan.participants == EVERYBODY


def test_a_launcher_that_was_only_out_of_reach_is_told_which_ranks_to_start_anew() -> None:
    job = lose_node()
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1))
    job.dark.clear()
    job.passes(1.5, beating=(0, 1))
    assert (job.machine.attempt, job.plan.strategy, job.plan.lost) == (2, Strategy.RESPAWN, (2, 3))


def test_a_launcher_that_is_started_again_does_not_hear_an_order_that_was_for_the_one_before_it() -> None:
    job = make(nodes=2)
    job.dies(2)
    job.decides()
    assert job.plan.lost == (2,)
    job.dark.add(1)
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1, 3))
    job.passes(5, beating=(0, 1))
    job.launches(1)
    job.passes(1, beating=(0, 1))
    assert (job.plan.strategy, job.plan.faulty, job.plan.lost) == (Strategy.RESPAWN, (2, 3), ())


def test_a_node_that_is_started_again_before_anybody_missed_it_is_taken_in() -> None:
    job = make(nodes=2)
    job.beat(*EVERYBODY)
    job.dark.add(1)
    job.passes(5, beating=(0, 1))
    assert job.machine.idle
    job.launches(1)
    job.comes_back(2, 3)
    job.decides()
    assert (job.plan.strategy, job.plan.faulty, job.plan.lost) == (Strategy.RESPAWN, (2, 3), ())


def test_without_a_launcher_nobody_is_waited_for() -> None:
    job = make(with_agent=False)
    job.beat(*EVERYBODY)
    job.passes(5, beating=(0, 2, 3), waiting=4.0)
    assert job.plan.strategy is Strategy.DUMP
    assert "no respawn: no agent can restart rank 1" in job.plan.reason
