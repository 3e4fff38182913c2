"""Retry and reload, the ladder between them, and what keeps a job from recovering for ever."""

from __future__ import annotations

import pytest
from support.control import AFTER_CLEAN, EVERYTHING, Job

from mindio_tft_patch.controller.events import Log
from mindio_tft_patch.protocol.messages import CommitState, Done, Ready
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy

EVERYBODY = (0, 1, 2, 3)
RELOADING = (Phase.REBUILD, Phase.ROLLBACK, Phase.RESUME)


def make(**options: object) -> Job:
    return Job(**{"strategies": EVERYTHING, **options})  # type: ignore[arg-type]


def faces(job: Job, rank: int, kind: FaultKind = FaultKind.MEMORY, detail: str = "") -> None:
    job.reports(rank, kind, detail)
    job.passes(2, beating=EVERYBODY)


def reload(job: Job) -> None:
    """Both holders of a shard are lost, the others have stopped and cleaned, the two are back."""
    job.dies(1)
    job.dies(3)
    job.decides()
    assert job.plan.strategy is Strategy.RELOAD
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2))
    job.comes_back(1, 3)


# Retry.


def test_a_suspect_rank_takes_part_and_is_refilled_from_the_other_holder() -> None:
    job = make()
    faces(job, 1)
    job.walks(Phase.STOP)
    plan = job.sent(Phase.CLEAN)[1].plan
    assert (plan.strategy, plan.faulty, plan.lost, plan.participants) == (Strategy.RETRY, (1,), (), EVERYBODY)
    assert [(one.replica_set.ranks, one.source) for one in plan.sources] == [((0, 2), 0), ((1, 3), 3)]
    job.walks(Phase.CLEAN, *AFTER_CLEAN)
    assert job.machine.idle
    assert (job.record["strategy"], job.record["ranks"], job.record["restarted"]) == ("retry", [1], [])
    faces(job, 0, FaultKind.NETWORK)
    assert job.plan.faulty == ()


def test_a_network_fault_moves_no_state() -> None:
    job = make()
    faces(job, 2, FaultKind.NETWORK)
    job.walks(Phase.STOP)
    assert (job.plan.strategy, job.plan.faulty) == (Strategy.RETRY, ())


def test_the_step_of_a_suspect_rank_does_not_decide() -> None:
    job = make()
    faces(job, 1)
    job.done(Phase.STOP, 1, step=6)
    job.done(Phase.STOP, 0, 2, 3, at_gate=6)
    assert job.plan.target_step == 5


def test_a_suspect_rank_need_not_reach_the_target() -> None:
    job = make()
    faces(job, 1)
    job.done(Phase.STOP, 1, step=5)
    job.done(Phase.STOP, 0, step=6)
    job.done(Phase.STOP, 2, 3, at_gate=6)
    plan = job.sent(Phase.CLEAN)[1].plan
    assert (plan.target_step, plan.participants, plan.faulty) == (6, EVERYBODY, (1,))


def test_a_memory_fault_inside_the_update_is_refilled_too() -> None:
    job = make()
    faces(job, 1)
    job.done(Phase.STOP, 1, updating=6)
    job.done(Phase.STOP, 0, 2, 3, at_gate=6)
    assert (job.plan.strategy, job.plan.faulty, job.plan.target_step) == (Strategy.RETRY, (1,), 5)


def test_a_rank_that_cannot_come_to_the_target_is_refilled() -> None:
    job = make()
    faces(job, 2, FaultKind.NETWORK)
    job.done(Phase.STOP, 0, step=6)
    job.done(Phase.STOP, 1, 2, 3)
    plan = job.sent(Phase.CLEAN)[0].plan
    assert (plan.target_step, plan.faulty, plan.participants) == (5, (0,), EVERYBODY)
    assert [one.source for one in plan.sources] == [2, 1]


def test_a_hang_that_nobody_can_be_blamed_for_is_retried() -> None:
    job = make(hang_seconds=20)
    job.beat(*EVERYBODY, step=4)
    job.beat(*EVERYBODY)
    job.passes(21, beating=EVERYBODY, waiting=19.0)
    assert (job.plan.strategy, job.plan.faulty) == (Strategy.RETRY, ())
    assert "nobody can be blamed" in job.plan.reason


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.TERMINATED])
def test_what_would_happen_again_is_saved_and_not_retried(kind: FaultKind) -> None:
    job = make()
    faces(job, 1, kind)
    assert job.plan.strategy is Strategy.DUMP
    for strategy in ("retry", "respawn", "reload"):
        assert f"no {strategy}: {kind.value}" in job.plan.reason


def test_a_suspect_rank_is_started_anew_when_its_repair_has_failed() -> None:
    job = make()
    faces(job, 1)
    job.walks(Phase.STOP, Phase.CLEAN, Phase.REBUILD)
    job.failed(Phase.REPAIR, 1, "checksum differs")
    job.passes(2, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.lost, job.plan.participants) == (Strategy.RESPAWN, (1,), (0, 2, 3))
    assert "no retry: repair failed on rank 1: checksum differs" in job.plan.reason
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2, 3))
    job.comes_back(1)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle
    assert (job.record["strategy"], job.record["restarted"], job.record["attempts"]) == ("respawn", [1], 2)


def test_a_suspect_rank_is_started_anew_when_nothing_but_that_is_offered() -> None:
    job = make(strategies=(Strategy.RESPAWN, Strategy.DUMP))
    faces(job, 1)
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (1,))


def test_a_suspect_rank_is_refilled_where_it_is_while_another_is_started_anew() -> None:
    job = make()
    job.reports(1, FaultKind.MEMORY)
    job.dies(2)
    job.decides()
    plan = job.plan
    assert (plan.strategy, plan.lost, plan.faulty, plan.participants) == (Strategy.RESPAWN, (2,), (1, 2), (0, 1, 3))
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 1, 3))
    job.comes_back(2)
    plan = job.sent(Phase.REPAIR)[0].plan if job.sent(Phase.REPAIR) else job.plan
    assert (plan.faulty, [one.source for one in plan.sources]) == ((1, 2), [0, 3])


def test_a_rank_that_does_not_stop_in_time_is_started_anew() -> None:
    job = make(phase_timeout_seconds=30)
    faces(job, 1, FaultKind.NETWORK)
    job.done(Phase.STOP, 0, 1, 2)
    job.passes(31, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (3,))


def test_a_phase_of_all_ranks_that_takes_too_long_costs_the_strategy_and_no_rank() -> None:
    job = make(phase_timeout_seconds=30)
    faces(job, 1, FaultKind.NETWORK)
    job.walks(Phase.STOP, Phase.CLEAN)
    job.done(Phase.REBUILD, 0)
    job.passes(31, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.participants) == (Strategy.DUMP, EVERYBODY)
    assert "no retry: rebuild was not answered within 30.0 s by ranks 1, 2, 3" in job.plan.reason
    assert "no respawn: no rank needs a new process" in job.plan.reason


def test_a_rank_whose_clean_failed_is_started_anew() -> None:
    job = make()
    faces(job, 1)
    job.walks(Phase.STOP)
    job.failed(Phase.CLEAN, 1, "device is gone")
    job.passes(2, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (1,))
    assert "no retry: rank 1 cannot take part (clean failed on rank 1: device is gone)" in job.plan.reason


def test_a_half_refilled_rank_is_not_saved_from() -> None:
    job = make(strategies=(Strategy.RETRY, Strategy.DUMP))
    faces(job, 1)
    job.walks(Phase.STOP, Phase.CLEAN, Phase.REBUILD)
    job.failed(Phase.REPAIR, 0, "no memory")
    job.passes(2, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.participants) == (Strategy.DUMP, (0, 2, 3))


def test_what_suspect_memory_holds_is_not_saved_while_another_rank_holds_it() -> None:
    job = make(strategies=(Strategy.RETRY, Strategy.DUMP))
    faces(job, 1)
    job.walks(Phase.STOP, Phase.CLEAN)
    job.failed(Phase.REBUILD, 0, "not supported")
    job.passes(2, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.participants, job.plan.faulty) == (Strategy.DUMP, EVERYBODY, ())
    job.walks(Phase.STOP)
    assert job.sent(Phase.CLEAN)[0].plan.participants == (0, 2, 3)
    assert all(source.source != 1 for source in job.sent(Phase.CLEAN)[0].plan.sources)


def test_what_suspect_memory_holds_is_saved_when_nobody_else_holds_it() -> None:
    job = make(strategies=(Strategy.RETRY, Strategy.DUMP))
    faces(job, 1)
    job.dies(3)
    job.decides()
    job.walks(Phase.STOP)
    assert job.sent(Phase.CLEAN)[0].plan.participants == (0, 1, 2)


# Reload.


def test_when_no_copy_is_left_all_ranks_load_the_last_checkpoint() -> None:
    job = make()
    reload(job)
    plan = job.sent(Phase.REBUILD)[3].plan
    assert (plan.lost, plan.faulty, plan.participants, plan.sources) == ((1, 3), (1, 3), EVERYBODY, ())
    job.walks(Phase.REBUILD)
    job.walks(Phase.ROLLBACK, step=2)
    assert job.sent(Phase.RESUME)[0].plan.target_step == 2
    job.walks(Phase.RESUME, step=2)
    assert job.machine.idle
    record = job.record
    assert (record["strategy"], record["step"], record["recomputed_steps"]) == ("reload", 2, 3)
    assert record["restarted"] == [1, 3]


def test_without_replicas_a_lost_process_comes_back_and_all_reload() -> None:
    job = make(strategies=(Strategy.RELOAD, Strategy.DUMP), world_size=2)
    job.dies(1)
    job.decides()
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RELOAD, (1,))


def test_ranks_that_load_different_steps_do_not_go_on() -> None:
    job = make()
    reload(job)
    job.walks(Phase.REBUILD)
    for rank in EVERYBODY:
        job.say(rank, Done(rank, job.machine.attempt, Phase.ROLLBACK, CommitState(2 if rank else 4)))
    assert job.plan.strategy is Strategy.EXIT
    assert "no reload: the ranks have loaded different steps: [2, 4]" in job.plan.reason


def test_a_reload_that_fails_when_nothing_else_is_covered_ends_the_job() -> None:
    job = make()
    reload(job)
    job.failed(Phase.REBUILD, 2, "no route")
    job.passes(2, beating=EVERYBODY)
    job.walks(Phase.STOP)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.strategy is Strategy.EXIT
    assert "no reload: rebuild failed on rank 2: no route" in verdict.reason
    assert "no dump: no usable copy" in verdict.reason


def test_a_reload_that_fails_before_any_state_was_replaced_leads_to_the_dump() -> None:
    job = make(strategies=(Strategy.RELOAD, Strategy.DUMP), copies=False)
    faces(job, 1, FaultKind.NETWORK)
    job.walks(Phase.STOP, Phase.CLEAN)
    job.failed(Phase.REBUILD, 2, "no route")
    job.passes(2, beating=EVERYBODY)
    assert (job.plan.strategy, job.plan.participants) == (Strategy.DUMP, EVERYBODY)


def test_what_was_half_loaded_is_never_saved() -> None:
    job = make(strategies=(Strategy.RELOAD, Strategy.DUMP), copies=False)
    faces(job, 1, FaultKind.NETWORK)
    job.walks(Phase.STOP, Phase.CLEAN, Phase.REBUILD)
    job.failed(Phase.ROLLBACK, 2, "file is gone")
    job.passes(2, beating=EVERYBODY)
    job.walks(Phase.STOP)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.strategy is Strategy.EXIT
    assert "no dump: the ranks had begun to load the last checkpoint" in verdict.reason


def test_a_death_while_ranks_load_is_followed_by_another_reload() -> None:
    job = make()
    reload(job)
    job.walks(Phase.REBUILD)
    job.dies(2)
    job.decides()
    assert (job.plan.strategy, job.plan.lost, job.plan.faulty) == (Strategy.RELOAD, (2,), (1, 2, 3))


# What has an end.


def recovers(job: Job, rank: int, step: int, kind: FaultKind = FaultKind.MEMORY) -> Strategy:
    faces(job, rank, kind)
    strategy = job.plan.strategy
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN, step=step)
    return strategy


def test_when_the_budget_is_used_up_the_next_fault_is_saved() -> None:
    job = make(restart_budget=2)
    assert recovers(job, 1, 5) is Strategy.RETRY
    assert recovers(job, 1, 6) is Strategy.RETRY
    assert job.record["budget_left"] == 0
    faces(job, 1)
    assert job.plan.strategy is Strategy.DUMP
    assert "no retry: the job has used up its 2 recoveries in place" in job.plan.reason


def test_a_budget_of_nothing_saves_at_once() -> None:
    job = make(restart_budget=0)
    job.dies(1)
    job.decides()
    assert job.plan.strategy is Strategy.DUMP


def test_a_fault_that_comes_back_twice_at_one_place_excludes_what_did_not_help() -> None:
    job = make()
    assert [recovers(job, 1, 5), recovers(job, 1, 5)] == [Strategy.RETRY] * 2
    faces(job, 1)
    job.walks(Phase.STOP)
    assert (job.plan.strategy, job.plan.lost) == (Strategy.RESPAWN, (1,))
    assert "no retry: it has not helped rank 1 at step 5: the fault came back 2 times in a row" in job.plan.reason


def dies_and_is_replaced(job: Job, rank: int, step: int) -> None:
    job.beat(*EVERYBODY, step=step)
    job.dies(rank)
    job.decides()
    job.walks(Phase.STOP, Phase.CLEAN, ranks=tuple(sorted({*EVERYBODY} - {rank})), step=step)
    job.comes_back(rank)
    job.walks(*AFTER_CLEAN, step=step)
    assert job.machine.idle and job.record["strategy"] == "respawn"


def test_what_no_restart_has_helped_is_saved_as_long_as_there_are_copies() -> None:
    job = make()
    for _ in range(2):
        dies_and_is_replaced(job, 1, 7)
    job.beat(*EVERYBODY, step=7)
    job.dies(1)
    job.decides()
    job.walks(Phase.STOP, ranks=(0, 2, 3), step=7)
    assert job.plan.strategy is Strategy.DUMP
    assert "no respawn: it has not helped rank 1 at step 7: the fault came back 2 times in a row" in job.plan.reason
    assert "no reload: copies of all shards are left, and a checkpoint of the last step costs none" in job.plan.reason
    job.walks(Phase.STOP, ranks=(0, 2, 3), step=7)
    assert job.plan.target_step == 7


def test_without_copies_going_back_is_what_the_user_has_chosen() -> None:
    job = make(copies=False, strategies=(Strategy.RELOAD, Strategy.DUMP))
    job.beat(*EVERYBODY)
    faces(job, 1, FaultKind.NETWORK)
    assert job.plan.strategy is Strategy.RELOAD


def test_before_the_first_step_of_the_job_there_is_nothing_that_a_dump_could_keep() -> None:
    job = make(start_step=5)
    for _ in range(2):
        dies_and_is_replaced(job, 1, 5)
    job.beat(*EVERYBODY)
    job.dies(1)
    job.decides()
    job.walks(Phase.STOP, ranks=(0, 2, 3))
    assert job.plan.strategy is Strategy.RELOAD


NO_CHECKPOINT = "this job has saved no checkpoint yet"


def says(job: Job, rank: int, no_checkpoint: str) -> None:
    job.say(rank, Ready(rank, 0, (job.set_of(rank),), EVERYTHING, no_checkpoint=no_checkpoint))


@pytest.mark.parametrize("lost", [(1, 3), (0, 2), EVERYBODY])
def test_a_reload_is_not_tried_when_it_is_known_that_there_is_nothing_to_load(lost: tuple[int, ...]) -> None:
    job = make()
    says(job, 0, NO_CHECKPOINT)
    for rank in lost:
        job.dies(rank)
    job.decides()
    assert job.plan.strategy is Strategy.EXIT
    assert f"no reload: {NO_CHECKPOINT}" in job.plan.reason


def test_the_first_checkpoint_that_was_saved_can_be_loaded() -> None:
    job = make()
    says(job, 0, NO_CHECKPOINT)
    says(job, 0, "")
    job.dies(1)
    job.dies(3)
    job.decides()
    assert job.plan.strategy is Strategy.RELOAD


def test_a_rank_is_said_to_be_ready_once() -> None:
    job = make()
    job.beat(*EVERYBODY)
    job.gets_ready(1)
    job.gets_ready(1, (Strategy.DUMP,))
    lines = [one for one in job.outbox if isinstance(one, Log) and "is ready at step" in one.text]
    assert lines == []


def test_a_fault_at_another_step_or_of_another_rank_begins_a_new_row() -> None:
    job = make()
    for rank, step in ((1, 5), (1, 5), (2, 5), (1, 5), (1, 6), (1, 5)):
        assert recovers(job, rank, step) is Strategy.RETRY
        assert job.machine.idle


def test_reloads_at_one_place_are_no_endless_loop_either() -> None:
    job = make(strategies=(Strategy.RELOAD, Strategy.DUMP), copies=False)
    for _ in range(2):
        faces(job, 1, FaultKind.NETWORK)
        job.walks(Phase.STOP, Phase.CLEAN, Phase.REBUILD)
        job.walks(Phase.ROLLBACK, Phase.RESUME, step=2)
        assert job.machine.idle
    faces(job, 1, FaultKind.NETWORK)
    job.walks(Phase.STOP)
    assert job.plan.strategy is Strategy.DUMP
    assert "no reload: it has not helped the job at step 5" in job.plan.reason


# Silent corruption.


def test_after_silent_corruption_the_last_step_on_which_all_agreed_is_saved() -> None:
    job = make()
    job.reports(1, FaultKind.CORRUPTION, "dense shard", step=4)
    job.reports(2, FaultKind.CORRUPTION, "dense shard", step=3)
    job.decides()
    assert job.plan.strategy is Strategy.DUMP
    assert "no retry: corruption is not cured by computing again" in job.plan.reason
    job.walks(Phase.STOP)
    assert (job.plan.target_step, job.plan.participants, len(job.plan.sources)) == (3, EVERYBODY, 2)
    assert "step 3 is the last one on which the holders of every shard agreed" in job.plan.reason
    job.walks(Phase.CLEAN)
    job.done(Phase.DUMP, *EVERYBODY, detail="/save/3")
    assert job.machine.verdict is not None and job.machine.verdict.step == 3
    assert job.record["recomputed_steps"] == 2


def test_when_the_holders_never_agreed_there_is_nothing_to_save() -> None:
    job = make()
    job.reports(1, FaultKind.CORRUPTION, "dense shard", step=0)
    job.decides()
    job.walks(Phase.STOP)
    job.walks(Phase.STOP)
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.EXIT
    assert "have not agreed on any step" in job.machine.verdict.reason


def test_a_decision_says_which_ranks_are_started_anew() -> None:
    job = make()
    job.dies(1)
    job.decides()
    decisions = [one for one in job.outbox if isinstance(one, Log) and one.text.startswith("decision")]
    assert decisions[0].fields["lost"] == [1]


def test_without_the_flag_for_retry_a_network_fault_is_respawn_without_a_new_process() -> None:
    job = make(strategies=(Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP))
    faces(job, 2, FaultKind.NETWORK)
    assert (job.plan.strategy, job.plan.lost, job.plan.faulty) == (Strategy.RESPAWN, (), ())
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN)
    assert job.machine.idle


def test_when_every_rank_is_lost_all_come_back_and_load_the_last_checkpoint() -> None:
    job = make()
    job.beat(*EVERYBODY)
    for rank in EVERYBODY:
        job.dies(rank)
    job.decides()
    told = job.to_agent(Phase.STOP)
    assert told is not None and (told.plan.strategy, told.plan.lost) == (Strategy.RELOAD, EVERYBODY)
    assert "no respawn: no usable copy" in told.plan.reason
    job.comes_back(3, 1, 0)
    assert job.sent(Phase.REBUILD) == {}
    job.comes_back(2)
    assert sorted(job.sent(Phase.REBUILD)) == [0, 1, 2, 3]
    job.walks(Phase.REBUILD)
    job.walks(Phase.ROLLBACK, Phase.RESUME, step=2)
    assert job.machine.idle and job.machine.verdict is None
    assert (job.record["strategy"], job.record["step"], job.record["restarted"]) == ("reload", 2, [0, 1, 2, 3])
    assert job.record["recomputed_steps"] == 3


def test_every_rank_may_be_lost_again_and_again_while_the_job_gets_on() -> None:
    job = make()
    for step in (5, 8, 11, 14):
        job.beat(*EVERYBODY, step=step)
        for rank in EVERYBODY:
            job.dies(rank)
        job.decides()
        job.comes_back(*EVERYBODY)
        job.walks(*RELOADING, step=step - 1)
        assert job.machine.idle and job.machine.verdict is None, job.plan.reason


def test_when_every_rank_is_lost_and_there_is_no_checkpoint_the_reason_says_so() -> None:
    job = make()
    for rank in EVERYBODY:
        job.dies(rank)
    job.decides()
    job.comes_back(*EVERYBODY)
    job.failed(Phase.REBUILD, 1, "no checkpoint")
    job.passes(2, beating=EVERYBODY)
    job.walks(Phase.STOP)
    job.passes(2, beating=EVERYBODY)
    verdict = job.machine.verdict
    assert verdict is not None and verdict.strategy is Strategy.EXIT
    assert "no reload: rebuild failed on rank 1: no checkpoint" in verdict.reason


@pytest.mark.parametrize("missing", ["agent", "offer", "set-up"])
def test_when_every_rank_is_lost_without_a_way_back_the_job_ends(missing: str) -> None:
    changes: dict[str, dict[str, object]] = {
        "agent": {"with_agent": False},
        "offer": {"strategies": (Strategy.DUMP,)},
        "set-up": {"ready": (0, 1, 2)},
    }
    job = make(**changes[missing])
    for rank in EVERYBODY:
        if missing == "agent":
            job.reports(rank, FaultKind.PROCESS_DEATH)
        else:
            job.dies(rank)
    job.decides()
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.EXIT
