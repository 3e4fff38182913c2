"""A cluster manager takes part: it orders the stop, names faulty ranks and chooses; the controller carries it out."""

from __future__ import annotations

import pytest
from support.control import AFTER_CLEAN, DUMP_ONLY, EVERYTHING
from support.managed import ManagedJob

from mindio_tft_patch.controller.events import ReportResult, Tell
from mindio_tft_patch.controller.roster import Fault
from mindio_tft_patch.controller.vocabulary import STRATEGIES, Code, FaultType, kind_of, ranks_of, word_of
from mindio_tft_patch.protocol.phases import LADDER, FaultKind, Phase, Strategy

EVERYBODY = (0, 1, 2, 3)
MEMORY, OTHER, NETWORK = (int(kind) for kind in FaultType)


def is_lost(job: ManagedJob, rank: int = 1) -> tuple[int, ...]:
    """A rank gives no sign of life any more while the others wait for it; the survivors have stopped."""
    survivors = tuple(other for other in EVERYBODY if other != rank)
    job.passes(3.5, beating=survivors, waiting=3.5)
    job.decides()
    job.done(Phase.STOP, *survivors)
    return survivors


def negotiates(job: ManagedJob, ranks: dict[int, int]) -> None:
    """The manager orders the stop and names the ranks."""
    assert job.stop(ranks).obeyed
    assert job.names(ranks).obeyed


# The words.


def test_every_strategy_has_a_word_in_the_order_of_the_ladder() -> None:
    assert tuple(strategy for group in STRATEGIES.values() for strategy in group) == LADDER
    assert [word_of(strategy) for strategy in LADDER] == ["retry", "recover", "recover", "dump", "exit"]


def test_what_is_told_of_a_rank_is_its_gravest_cause() -> None:
    faults = [
        Fault(3, FaultKind.COLLATERAL, ""),
        Fault(1, FaultKind.MEMORY, ""),
        Fault(1, FaultKind.PROCESS_DEATH, ""),
        Fault(2, FaultKind.MEMORY, ""),
        Fault(None, FaultKind.TERMINATED, ""),
    ]
    assert ranks_of(faults) == {1: OTHER, 2: MEMORY}
    assert ranks_of(faults[:1]) == {3: NETWORK}


def test_a_number_that_is_not_documented_is_no_kind() -> None:
    assert [kind_of(number) for number in (0, 1, 2)] == [FaultKind.MEMORY, FaultKind.DECLARED, FaultKind.NETWORK]
    with pytest.raises(ValueError, match="3"):
        kind_of(3)


# The path of a fault.


def test_a_memory_fault_is_reported_stopped_offered_and_retried() -> None:
    job = ManagedJob()
    job.reports(1, FaultKind.MEMORY)
    assert job.told == []
    job.decides()
    assert job.told_faults == [{1: MEMORY}]
    assert set(job.sent(Phase.STOP)) == set(EVERYBODY)
    assert job.stop({1: MEMORY}).obeyed
    assert job.told_stopped == []
    job.done(Phase.STOP, *EVERYBODY)
    assert [(int(one.code), dict(one.ranks)) for one in job.told_stopped] == [(Code.GOOD, {1: MEMORY})]
    assert job.sent(Phase.CLEAN) == {}
    assert job.names({1: MEMORY}).obeyed
    assert job.told_strategies == [("retry", "recover", "dump", "exit")]
    assert job.chooses("retry").obeyed
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN)
    assert job.machine.idle
    assert job.told_results == [(Code.GOOD, "retry")]
    assert job.told_faults == [{1: MEMORY}]
    record = job.record
    assert (record["strategy"], record["ranks"], record["attempts"]) == ("retry", [1], 2)


def test_the_time_in_which_the_manager_was_waited_for_is_in_the_record() -> None:
    job = ManagedJob()
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    job.stop({})
    job.passes(5, beating=EVERYBODY)
    job.names({})
    job.chooses("retry")
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN)
    assert job.record["seconds"]["manager"] == pytest.approx(5, abs=0.1)  # type: ignore[index]


def test_a_lost_rank_is_awaited_although_no_agent_can_start_it() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    assert job.told_strategies == [("recover", "dump", "exit")]
    assert job.chooses("recover").obeyed
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    assert job.plan.strategy is Strategy.RESPAWN
    assert "waiting up to 300 s for the cluster manager to start rank 1 anew" in job.plan.reason
    assert job.sent(Phase.REBUILD) == {}
    job.passes(60, beating=survivors)
    job.comes_back(1)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle
    assert job.told_results == [(Code.GOOD, "recover")]
    assert job.record["restarted"] == [1]


def test_without_a_manager_the_same_loss_ends_in_a_dump() -> None:
    job = ManagedJob(attached=False)
    survivors = is_lost(job)
    assert job.plan.strategy is Strategy.DUMP
    job.walks(Phase.CLEAN, ranks=survivors)
    job.done(Phase.DUMP, *survivors, detail="/save/iter_0000005")
    assert job.machine.verdict is not None and job.told == []


def test_a_process_that_comes_back_before_the_choice_is_taken_in() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    job.stop({1: OTHER})
    job.comes_back(1)
    job.names({1: OTHER})
    job.chooses("recover")
    job.walks(Phase.STOP, ranks=EVERYBODY)
    job.walks(Phase.CLEAN, ranks=survivors)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle and job.told_results == [(Code.GOOD, "recover")]


def test_recover_reloads_when_no_copy_of_a_shard_is_left() -> None:
    job = ManagedJob()
    job.passes(3.5, beating=(0, 2), waiting=3.5)
    job.decides()
    job.done(Phase.STOP, 0, 2)
    negotiates(job, {1: OTHER, 3: OTHER})
    assert job.told_strategies == [("recover", "exit")]
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2))
    assert job.plan.strategy is Strategy.RELOAD
    job.comes_back(1, 3)
    job.walks(Phase.REBUILD, Phase.ROLLBACK, Phase.RESUME)
    assert job.machine.idle and job.told_results == [(Code.GOOD, "recover")]


def test_ranks_that_only_the_manager_knows_of_are_lost_and_replaced_too() -> None:
    job = ManagedJob()
    is_lost(job)
    job.stop({1: OTHER})
    job.names({0: OTHER, 1: OTHER})  # their node as a whole
    assert "fault: rank 0: declared (the cluster manager says so)" in job.log
    assert job.told_strategies == [("recover", "dump", "exit")]
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(2, 3))
    assert job.plan.faulty == (0, 1)
    job.comes_back(0, 1)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle
    assert job.told_faults == [{1: OTHER}]


def test_an_exception_is_not_final_when_the_manager_replaces_the_process() -> None:
    job = ManagedJob()
    job.reports(1, FaultKind.EXCEPTION, "ValueError")
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    job.stop({})
    job.names({})
    assert job.told_strategies == [("dump", "exit")]
    job.names({1: OTHER})
    assert job.told_strategies[-1] == ("recover", "dump", "exit")


def test_dump_and_exit_end_the_job() -> None:
    for word, phases in (("dump", (Phase.STOP, Phase.CLEAN)), ("exit", (Phase.STOP,))):
        job = ManagedJob()
        survivors = is_lost(job)
        negotiates(job, {1: OTHER})
        job.chooses(word)
        job.walks(*phases, ranks=survivors)
        if word == "dump":
            job.done(Phase.DUMP, *survivors, detail="/save/iter_0000005")
        assert job.machine.verdict is not None
        assert job.machine.verdict.strategy.value == word
        assert job.told_results == [(Code.GOOD, word)]
        assert set(job.sent(Phase.EXIT)) == set(EVERYBODY)


# What the manager begins.


def test_the_manager_stops_a_job_in_which_nothing_was_seen() -> None:
    job = ManagedJob()
    assert job.stop({2: OTHER}).obeyed
    job.decides()
    assert set(job.sent(Phase.STOP)) == {0, 1, 3}
    job.done(Phase.STOP, 0, 1, 3)
    assert [int(one.code) for one in job.told_stopped] == [Code.GOOD]
    assert job.told_faults == []  # it knows
    job.names({2: OTHER})
    assert job.told_strategies == [("recover", "dump", "exit")]


def test_a_stop_without_ranks_can_be_retried() -> None:
    job = ManagedJob()
    assert job.stop({}).obeyed
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    job.names({})
    assert job.told_strategies == [("retry", "recover", "dump", "exit")]
    job.chooses("retry")
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN)
    assert job.machine.idle and job.record["ranks"] == []


def test_a_memory_error_that_only_the_manager_knows_of_is_refilled() -> None:
    job = ManagedJob()
    job.stop({1: MEMORY})
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    job.names({1: MEMORY})
    job.chooses("retry")
    job.walks(Phase.STOP)
    assert job.plan.faulty == (1,)
    assert [source.source for source in job.plan.sources] == [0, 3]


def test_an_order_to_stop_does_not_wait_for_other_reports() -> None:
    job = ManagedJob()
    job.reports(0, FaultKind.COLLATERAL)
    job.passes(0.2, beating=EVERYBODY)
    assert job.sent(Phase.STOP) == {}
    job.stop({1: OTHER})
    job.passes(0.05, beating=EVERYBODY)
    assert set(job.sent(Phase.STOP)) == {0, 2, 3}


def test_save_and_exit_needs_no_negotiation_at_any_time() -> None:
    for prelude in (lambda job: None, is_lost, lambda job: (is_lost(job), job.stop({1: OTHER}))):
        job = ManagedJob()
        prelude(job)
        assert job.saves_and_exits().obeyed
        job.decides()
        alive = tuple(rank for rank, state in job.machine.roster.ranks.items() if state.present)
        job.done(Phase.STOP, *alive)
        assert job.plan.strategy is Strategy.DUMP
        job.done(Phase.CLEAN, *alive)
        job.done(Phase.DUMP, *alive, detail="/save/iter_0000005")
        assert job.machine.verdict is not None
        assert job.told_results == [(Code.GOOD, "dump")]


def test_save_and_exit_works_without_callbacks() -> None:
    job = ManagedJob(attached=False)
    assert job.saves_and_exits().obeyed
    job.decides()
    assert job.plan.strategy is Strategy.DUMP


# A strategy fails.


def retried(job: ManagedJob) -> None:
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    negotiates(job, {1: MEMORY})
    job.chooses("retry")
    job.walks(Phase.STOP, Phase.CLEAN)


def test_a_retry_that_fails_goes_back_to_the_manager_which_recovers() -> None:
    job = ManagedJob()
    retried(job)
    job.failed(Phase.REBUILD, 2, "no connection")
    job.passes(5, beating=EVERYBODY)
    assert job.told_results == []  # not before all have stopped
    job.done(Phase.STOP, *EVERYBODY)
    assert job.told_results == [(Code.RECOVER_LEFT, "retry")]
    assert job.names({1: OTHER}).obeyed
    assert job.told_strategies[-1] == ("recover", "dump", "exit")
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 2, 3))
    job.comes_back(1)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle
    assert job.told_results == [(Code.RECOVER_LEFT, "retry"), (Code.GOOD, "recover")]


def test_after_a_failure_the_manager_may_choose_at_once() -> None:
    job = ManagedJob()
    retried(job)
    job.failed(Phase.REBUILD, 2, "no connection")
    job.passes(5, beating=EVERYBODY)
    job.done(Phase.STOP, *EVERYBODY)
    assert not job.chooses("retry").obeyed
    assert job.chooses("dump").obeyed
    job.dumps(*EVERYBODY)
    assert job.told_results[-1] == (Code.GOOD, "dump")


def test_a_process_that_does_not_come_back_leaves_dump_and_exit() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    job.passes(301, beating=survivors, step=0.5)
    job.done(Phase.STOP, *survivors)
    assert job.told_results == [(Code.DUMP_LEFT, "recover")]
    assert "did not come back" in [one for one in job.told if isinstance(one, ReportResult)][-1].text


def test_a_process_that_is_lost_again_and_again_on_its_way_back_is_not_awaited_for_ever() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("recover")
    for _ in range(4):
        job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
        if job.told_results:
            break
        job.registers_again(1)
        job.passes(7, beating=survivors)
    assert job.told_results == [(Code.DUMP_LEFT, "recover")]
    assert "was started anew 3 times" in [one for one in job.told if isinstance(one, ReportResult)][-1].text


def test_a_dump_that_fails_twice_leaves_exit() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("dump")
    for _ in range(2):
        job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
        for rank in survivors:
            job.failed(Phase.DUMP, rank, "disk full")
        job.passes(6, beating=survivors)
        survivors = tuple(job.sent(Phase.STOP))
    job.done(Phase.STOP, *survivors)
    assert job.told_results == [(Code.EXIT_LEFT, "dump")]
    assert job.chooses("exit").obeyed
    job.done(Phase.STOP, *survivors)
    assert job.machine.verdict is not None and job.told_results[-1] == (Code.GOOD, "exit")


def test_ranks_have_time_to_stop_after_a_dump_that_has_used_up_its_own() -> None:
    job = ManagedJob(dump_timeout_seconds=30.0)
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("dump")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    job.passes(28, beating=survivors)
    job.failed(Phase.DUMP, 0, "disk full")
    job.passes(8, beating=survivors)
    assert set(job.sent(Phase.STOP)) == set(survivors)
    job.done(Phase.STOP, *survivors)
    assert job.told_results == [(Code.EXIT_LEFT, "dump")]
    assert "TTP_OT are over" in [one for one in job.told if isinstance(one, ReportResult)][-1].text


def test_a_second_death_while_a_process_is_awaited_is_reported_and_awaited_too() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    job.passes(7, beating=(0, 3))
    assert job.told_faults[-1] == {1: OTHER, 2: OTHER}
    job.walks(Phase.STOP, Phase.CLEAN, ranks=(0, 3))
    assert job.plan.faulty == (1, 2)
    job.comes_back(1, 2)
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle and job.told_results == [(Code.GOOD, "recover")]


def test_a_rank_that_dies_while_the_manager_thinks_changes_what_is_offered() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    assert job.told_strategies == [("recover", "dump", "exit")]
    job.passes(7, beating=(0, 2))
    job.done(Phase.STOP, *(rank for rank in survivors if rank != 3))
    assert job.told_faults[-1] == {1: OTHER, 3: OTHER}
    assert job.told_strategies[-1] == ("recover", "exit")


def test_the_manager_may_lose_patience_with_a_recovery_but_not_with_the_end() -> None:
    job = ManagedJob()
    survivors = is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("recover")
    job.walks(Phase.STOP, Phase.CLEAN, ranks=survivors)
    assert not job.chooses("retry").obeyed
    assert job.chooses("dump").obeyed
    assert not job.chooses("recover").obeyed
    job.passes(0.1, beating=survivors)
    assert job.plan.strategy is Strategy.DUMP
    job.dumps(*survivors)
    assert job.told_results == [(Code.GOOD, "dump")]


# The manager is silent, or cannot be told.


@pytest.mark.parametrize("said", ["nothing", "stop", "ranks"])
def test_a_manager_that_says_nothing_more_leaves_the_decision_to_the_controller(said: str) -> None:
    job = ManagedJob(manager_seconds=7.0)
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    if said != "nothing":
        job.stop({1: MEMORY})
    job.done(Phase.STOP, *EVERYBODY)
    if said == "ranks":
        job.names({1: MEMORY})
    job.passes(6.5, beating=EVERYBODY)
    assert job.sent(Phase.CLEAN) == {}
    job.passes(1, beating=EVERYBODY)
    assert "the controller decides by itself" in job.log
    assert job.plan.strategy is Strategy.RETRY
    job.walks(Phase.STOP, Phase.CLEAN, *AFTER_CLEAN)
    assert job.machine.idle and job.told_results == [(Code.GOOD, "retry")]
    for late in (job.stop({1: MEMORY}), job.names({1: MEMORY}), job.chooses("retry")):
        assert late.obeyed is (late.reason == "")


def test_the_choice_may_take_as_long_as_the_manager_has_said() -> None:
    job = ManagedJob(manager_seconds=7.0)
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.stop({})
    job.done(Phase.STOP, *EVERYBODY)
    job.names({}, seconds=50)
    job.passes(49, beating=EVERYBODY)
    assert job.chooses("retry").obeyed


def test_a_lost_rank_is_not_awaited_when_the_manager_says_nothing() -> None:
    job = ManagedJob(manager_seconds=7.0)
    survivors = is_lost(job)
    job.passes(8, beating=survivors)
    assert job.plan.strategy is Strategy.DUMP
    assert "no agent can restart rank 1" in job.plan.reason


def test_a_manager_that_cannot_be_told_is_not_waited_for() -> None:
    job = ManagedJob()
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    assert job.unheard().obeyed
    job.passes(0.1, beating=EVERYBODY)
    job.done(Phase.STOP, *EVERYBODY)
    assert job.plan.strategy is Strategy.RETRY and job.sent(Phase.CLEAN)


def test_a_result_that_cannot_be_told_changes_nothing() -> None:
    job = ManagedJob()
    retried(job)
    assert job.unheard().obeyed
    job.walks(*AFTER_CLEAN)
    assert job.machine.idle
    assert job.unheard().obeyed and job.machine.idle


def test_ranks_in_their_set_up_cannot_be_recovered_and_the_manager_is_told() -> None:
    job = ManagedJob(ready=(0, 1))
    job.stop({3: OTHER})
    job.decides()
    job.done(Phase.STOP, 0, 1)
    assert [int(one.code) for one in job.told_stopped] == [Code.NOT_READY]
    job.passes(0.1, beating=(0, 1, 2))
    job.done(Phase.STOP, 0, 1)
    assert job.machine.verdict is not None and job.machine.verdict.strategy is Strategy.EXIT
    assert job.told_results == [(Code.GOOD, "exit")]


def test_a_fault_of_which_no_rank_is_known_is_not_negotiated() -> None:
    job = ManagedJob()
    job.terminate()
    job.decides()
    assert job.plan.strategy is Strategy.DUMP
    assert job.told == []


# What is refused.


def test_orders_that_do_not_fit_are_refused_and_change_nothing() -> None:
    job = ManagedJob()
    assert "no recovery" in job.names({1: OTHER}).reason
    assert "no recovery" in job.chooses("retry").reason
    assert "nothing is paused" in job.chooses("continue").reason
    for word in ("downgrade", "upgrade", "migration", "hot switch", ""):
        assert "is not offered" in job.chooses(word).reason
    assert "rank 7 is not from 0 to 3" in job.stop({7: OTHER}).reason
    assert "9" in job.stop({1: 9}).reason
    assert job.machine.idle and job.told == [] and job.machine.attempt == 0


def test_the_order_of_the_orders_counts() -> None:
    job = ManagedJob()
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    assert not job.names({1: MEMORY}).obeyed
    assert not job.chooses("retry").obeyed
    job.done(Phase.STOP, *EVERYBODY)
    assert not job.names({1: MEMORY}).obeyed  # the stop was not ordered
    job.stop({1: MEMORY})
    assert not job.chooses("retry").obeyed  # nothing was offered
    job.names({1: MEMORY})
    assert job.chooses("retry").obeyed
    assert not job.stop({1: MEMORY}).obeyed


def test_what_was_not_offered_cannot_be_chosen() -> None:
    job = ManagedJob(strategies=DUMP_ONLY)
    job.reports(1, FaultKind.MEMORY)
    job.decides()
    job.done(Phase.STOP, *EVERYBODY)
    negotiates(job, {1: MEMORY})
    assert job.told_strategies == [("dump", "exit")]
    assert "only dump, exit are possible" in job.chooses("retry").reason


def test_processes_are_not_started_anew_when_the_switch_of_the_controller_is_off() -> None:
    job = ManagedJob(restarts=False)
    is_lost(job)
    negotiates(job, {1: OTHER})
    assert job.told_strategies == [("dump", "exit")]


def test_nothing_is_obeyed_when_the_job_is_ending_or_no_manager_is_attached() -> None:
    job = ManagedJob()
    is_lost(job)
    negotiates(job, {1: OTHER})
    job.chooses("exit")
    job.done(Phase.STOP, 0, 2, 3)
    assert "the job is ending" in job.stop({1: OTHER}).reason
    assert "the job is ending" in job.saves_and_exits().reason
    alone = ManagedJob(attached=False)
    assert "no cluster manager is attached" in alone.stop({1: OTHER}).reason
    assert "no cluster manager is attached" in alone.pauses().reason


def test_a_job_without_a_manager_tells_nothing_and_sends_what_it_always_sent() -> None:
    for kind in (FaultKind.MEMORY, FaultKind.EXCEPTION, FaultKind.NETWORK):
        job = ManagedJob(attached=False, with_agent=True)
        job.reports(1, kind)
        job.passes(2, beating=EVERYBODY)
        job.walks(Phase.STOP, Phase.CLEAN)
        assert not any(isinstance(one, Tell) for one in job.outbox)
        assert job.machine.attempt == 1


def test_agents_are_told_who_is_to_be_started_anew_under_a_manager_too() -> None:
    job = ManagedJob(with_agent=True, strategies=EVERYTHING)
    job.dies(1)
    job.decides()
    stop = job.to_agent(Phase.STOP)
    assert stop is not None and stop.plan.lost == ()
    job.done(Phase.STOP, 0, 2, 3)
    negotiates(job, {1: OTHER})
    job.chooses("recover")
    stop = job.to_agent(Phase.STOP)
    assert stop is not None and stop.plan.lost == (1,)


def test_a_process_that_comes_back_while_the_manager_is_asked_and_then_hangs_holds_nobody_up() -> None:
    times = {"dump_timeout_seconds": 30, "phase_timeout_seconds": 30, "return_seconds": 60, "manager_seconds": 20}
    job = ManagedJob(strategies=DUMP_ONLY, with_agent=True, **times)
    for rank in (0, 1, 2):
        job.dies(rank)
    job.finishes(3)
    job.registers_again(0)
    job.gets_ready(0, tuple(Strategy))
    job.passes(200, step=1.0)
    assert "rank 0: hang" in job.log
    assert job.machine.verdict is not None
