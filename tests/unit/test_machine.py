from __future__ import annotations

import pytest
from support.control import Job, register

from mindio_tft_patch.controller.events import Conclude, Log, Received, Send, processor
from mindio_tft_patch.protocol.messages import CommitState, Done, FaultReport, Ready, Welcome
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy


def test_a_registered_rank_is_welcomed() -> None:
    job = Job(world_size=2)
    assert Send(processor(0), Welcome(0, True)) in job.say(0, register(0, 2))


def test_a_dead_rank_leads_to_a_dump_by_the_others_and_to_exit_with_its_path() -> None:
    job = Job()
    job.dies(1)
    assert job.sent(Phase.STOP) == {}
    job.decides()
    stop = job.sent(Phase.STOP)
    assert sorted(stop) == [0, 2, 3]
    assert stop[0].plan.faulty == (1,)
    job.done(Phase.STOP, 0, 2, 3)
    assert sorted(job.sent(Phase.CLEAN)) == [0, 2, 3]
    job.done(Phase.CLEAN, 0, 2, 3)
    plan = job.sent(Phase.DUMP)[0].plan
    assert (plan.target_step, plan.participants, [s.source for s in plan.sources]) == (5, (0, 2, 3), [0, 3])
    job.done(Phase.DUMP, 0, 2, 3, detail="/save/iter_0000005")
    verdict = job.machine.verdict
    assert verdict is not None
    assert (verdict.strategy, verdict.checkpoint, verdict.step) == (Strategy.DUMP, "/save/iter_0000005", 5)
    assert job.sent(Phase.EXIT)[3].plan.detail == "/save/iter_0000005"
    told = job.to_agent(Phase.EXIT)
    assert told is not None and told.plan.detail == "/save/iter_0000005"


def test_agents_hear_every_phase() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.dumps(0, 2, 3)
    assert all(job.to_agent(phase) is not None for phase in (Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT))


def test_the_record_is_the_last_line_of_a_recovery() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.dumps(0, 2, 3)
    last = job.outbox[-1]
    assert isinstance(last, Log)
    assert last.fields["record"] == "recovery"
    assert last.fields["ranks"] == [1]
    assert last.fields["step"] == 5
    assert last.fields["strategy"] == "dump"
    assert last.fields["recomputed_steps"] == 0
    assert last.fields["bytes_moved"] == 90
    assert set(last.fields["seconds"]) == {"stop", "clean", "dump"}
    assert "process_death" in str(last.fields["reason"])
    assert last.text.startswith("recovery over: dump in "), "the fields are beside the words, not in them"
    assert "step 5 kept, 0 completed step(s) to be computed again; checkpoint " in last.text


def test_two_ranks_that_die_together_are_one_fault() -> None:
    job = Job()
    job.dies(0)
    job.passes(0.1)
    job.dies(1)
    job.decides()
    assert job.machine.attempt == 1
    assert job.sent(Phase.STOP)[2].plan.faulty == (0, 1)


def test_the_death_of_rank_0_is_a_fault_like_any_other() -> None:
    job = Job()
    job.dies(0)
    job.decides()
    job.dumps(1, 2, 3)
    assert job.machine.verdict is not None and job.machine.verdict.checkpoint


def test_the_death_of_both_holders_of_a_shard_leads_to_exit_with_the_reason() -> None:
    job = Job()
    job.dies(0)
    job.dies(2)
    job.decides()
    job.done(Phase.STOP, 1, 3)
    verdict = job.machine.verdict
    assert verdict is not None
    assert (verdict.strategy, verdict.checkpoint, verdict.step) == (Strategy.EXIT, "", 0)
    assert "no usable copy of the dense optimizer shard of ranks 0, 2" in verdict.reason
    assert job.sent(Phase.DUMP) == {}


def test_a_closed_connection_is_not_acted_on_before_the_death_behind_it_is_known() -> None:
    job = Job()
    job.reports(0, FaultKind.COLLATERAL, "connection closed by peer")
    job.passes(0.2)
    assert job.machine.attempt == 0
    job.dies(1)
    job.decides()
    assert job.sent(Phase.STOP)[0].plan.faulty == (1,)


def test_a_closed_connection_without_a_root_cause_leads_to_a_dump_by_all() -> None:
    job = Job()
    job.reports(0, FaultKind.COLLATERAL)
    job.passes(2.0, beating=(0, 1, 2, 3))
    assert sorted(job.sent(Phase.STOP)) == [0, 1, 2, 3]
    assert job.sent(Phase.STOP)[0].plan.faulty == ()


def test_collateral_reports_while_ranks_stop_start_no_new_attempt() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.reports(0, FaultKind.COLLATERAL)
    job.reports(2, FaultKind.NETWORK)
    job.decides()
    assert job.machine.attempt == 1


def test_a_fault_in_the_set_up_ends_the_job_since_there_is_nothing_to_save() -> None:
    job = Job(ready=(0, 1))
    job.dies(2)
    job.decides()
    job.done(Phase.STOP, 0, 1)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.strategy is Strategy.EXIT
    assert "ranks 2, 3 did not finish the set-up" in verdict.reason
    assert set(job.sent(Phase.EXIT)) == {0, 1, 3}


def test_a_fault_before_the_first_completed_step_ends_the_job() -> None:
    job = Job(start_step=5)
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, 2, 3)
    job.done(Phase.STOP, 0, 2, 3)
    verdict = job.machine.verdict
    assert verdict is not None and "no step was completed since the job started at step 5" in verdict.reason
    assert job.sent(Phase.DUMP) == {}


def test_what_happens_to_a_rank_that_has_finished_is_no_fault() -> None:
    job = Job()
    for rank in range(4):
        job.finishes(rank)
    job.dies(2)
    job.passes(3)
    assert job.machine.idle


@pytest.mark.parametrize("who", [(1,), (0, 1, 2, 3), ()])
def test_a_request_to_end_saves_with_all_ranks(who: tuple[int, ...]) -> None:
    job = Job()
    for rank in who:
        job.reports(rank, FaultKind.TERMINATED, "SIGTERM")
    if not who:
        job.terminate()
    job.decides()
    assert job.sent(Phase.STOP)[0].plan.participants == (0, 1, 2, 3)
    job.dumps(0, 1, 2, 3)
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.DUMP


def test_a_rank_whose_user_code_raised_takes_part_in_the_dump() -> None:
    job = Job()
    job.reports(1, FaultKind.EXCEPTION, "ValueError")
    job.decides()
    assert job.sent(Phase.STOP)[0].plan.participants == (0, 1, 2, 3)
    assert job.sent(Phase.STOP)[0].plan.faulty == ()


def test_a_rank_with_a_fault_inside_its_update_is_not_used() -> None:
    job = Job()
    job.reports(1, FaultKind.MEMORY, "bit flip")
    job.decides()
    job.done(Phase.STOP, 1, updating=6)
    job.done(Phase.STOP, 0, 2, 3, at_gate=6)
    plan = job.sent(Phase.CLEAN)[0].plan
    assert (plan.participants, plan.faulty, plan.target_step) == ((0, 2, 3), (1,), 5)


def test_when_a_healthy_rank_has_passed_the_gate_all_complete_the_step() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.done(Phase.STOP, 0, step=6)
    job.done(Phase.STOP, 2, 3, at_gate=6)
    assert job.sent(Phase.CLEAN)[3].plan.target_step == 6


def test_a_stopped_rank_is_the_culprit_of_a_hang() -> None:
    job = Job(hang_seconds=20)
    job.beat(0, 1, 2, 3, step=4)
    job.beat(0, 1, 2, 3)
    job.passes(10, beating=(0, 1, 3), waiting=9.5)
    assert job.machine.idle
    job.passes(11, beating=(0, 1, 3), waiting=19.0)
    told = job.to_agent(Phase.STOP)
    assert told is not None and told.plan.faulty == (2,)
    assert "hang" in told.plan.reason


def test_a_silent_rank_is_not_declared_dead_while_an_agent_watches_it() -> None:
    job = Job()
    job.beat(0, 1, 2, 3)
    job.passes(30, beating=(0, 1, 3), waiting=20.0)
    assert job.machine.idle


def test_without_an_agent_a_silent_rank_is_lost_when_others_wait_for_it() -> None:
    job = Job(with_agent=False)
    job.beat(0, 1, 2, 3)
    job.passes(30, beating=(0, 1, 3))
    assert job.machine.idle
    job.passes(2, beating=(0, 1, 3), waiting=5.0)
    assert job.sent(Phase.STOP)[0].plan.faulty == (2,)


def test_a_hang_that_nobody_can_be_blamed_for_is_saved_by_everybody_who_answers() -> None:
    job = Job(hang_seconds=20)
    job.beat(0, 1, 2, 3, step=4)
    job.beat(0, 1, 2, 3)
    job.passes(21, beating=(0, 1, 2, 3), waiting=19.0)
    plan = job.sent(Phase.STOP)[0].plan
    assert (plan.faulty, plan.participants) == ((), (0, 1, 2, 3))
    assert "nobody can be blamed" in plan.reason


def test_a_rank_that_reconnects_is_told_again_what_is_waited_for() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.outbox.clear()
    job.say(2, register(2))
    assert list(job.sent(Phase.STOP)) == [2]


def test_a_rank_that_goes_on_beating_after_exit_is_told_again() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.dumps(0, 2, 3)
    job.outbox.clear()
    job.beat(2, activity=Activity.RECOVERY)
    assert job.sent(Phase.EXIT) == {}
    job.passes(1.1)
    job.beat(2, activity=Activity.RECOVERY)
    assert list(job.sent(Phase.EXIT)) == [2]


def test_after_the_verdict_nothing_is_decided_any_more() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.dumps(0, 2, 3)
    job.outbox.clear()
    job.dies(0)
    job.terminate()
    job.passes(5)
    assert job.outbox == [] or not any(isinstance(one, Conclude) for one in job.outbox)
    refusal = job.machine.refusal(register(1, pid=7), job.now, same_connection=False)
    assert refusal is not None and refusal.reason.startswith("the job is ending")
    assert not refusal.passing


def test_messages_of_a_rank_that_never_registered_change_nothing() -> None:
    job = Job(world_size=2)
    job.machine.roster.ranks[1].registered = None
    assert job.say(1, FaultReport(1, FaultKind.EXCEPTION, "x")) == []
    assert job.feed(Received(processor(1), Ready(1, 0, (), ()))) == []
    assert job.say(1, Done(1, 1, Phase.STOP, CommitState(1))) == []


@pytest.mark.parametrize("first", ["tick", "message"])
@pytest.mark.parametrize("with_agent", [True, False])
def test_nobody_was_silent_while_the_controller_itself_did_not_run(first: str, with_agent: bool) -> None:
    job = Job(with_agent=with_agent)
    for _ in range(5):
        job.passes(2, beating=(0, 1, 2, 3), waiting=8.0)
        job.now += 600  # everything stands still
        if first == "message":
            job.beat(0, waiting=8.0)
        job.passes(0.5)  # what the ranks have sent is read a moment later
    job.passes(3, beating=(0, 1, 2, 3))
    assert job.machine.idle and not job.machine.roster.faults


def test_a_rank_that_is_gone_after_the_controller_stood_still_is_missed_as_always() -> None:
    job = Job(with_agent=False)
    job.passes(2, beating=(0, 1, 2, 3))
    job.now += 600
    job.passes(5, beating=(0, 2, 3), waiting=4.0)
    assert [fault.rank for fault in job.machine.roster.faults] == [1]


def test_a_phase_is_not_over_time_because_the_controller_stood_still() -> None:
    job = Job()
    job.dies(1)
    job.decides()
    job.now += 600
    job.passes(0.5)
    job.dumps(0, 2, 3)
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.DUMP


def test_a_rank_that_ends_without_an_error_in_the_middle_of_training_is_missed() -> None:
    job = Job()
    job.dies(1, "ended with exit code 0")
    job.decides()
    assert job.sent(Phase.STOP)[0].plan.faulty == (1,)


def test_a_rank_that_ends_after_training_is_not_missed() -> None:
    job = Job()
    for rank in range(4):
        job.finishes(rank)
        job.dies(rank, "ended with exit code 0")
        job.decides()
    assert job.machine.idle and not job.machine.roster.faults
