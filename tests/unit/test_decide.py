from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.control import progress

from mindio_tft_patch.controller import decide, targets, watch
from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.roster import Fault, Roster
from mindio_tft_patch.protocol.messages import CommitState, Failed, Ready, Register, ReplicaSet, Role
from mindio_tft_patch.protocol.phases import Activity, FaultKind, Phase, Strategy

NOW = 1000.0


def make(*, hang_seconds: float = 60.0, strategies: tuple[Strategy, ...] = (Strategy.DUMP,)) -> Roster:
    """Four ranks in training for long, silent for half a second, sets (0, 2) and (1, 3), one agent."""
    roster = Roster(Options(world_size=4, hang_seconds=hang_seconds))
    roster.register(Register(Role.AGENT, -1, 4, 9, "a", 0, (0, 1, 2, 3)), NOW)
    for rank, state in roster.ranks.items():
        roster.register(Register(Role.PROCESSOR, rank, 4, 100 + rank, "a"), NOW - 0.5)
        state.ready = Ready(rank, 0, (ReplicaSet("dense", (rank % 2, rank % 2 + 2)),), strategies)
        state.progress = progress(5)
    roster.progress_at, roster.stepped = NOW, True
    return roster


def waiting(roster: Roster, *ranks: int, seconds: float, activity: Activity = Activity.COMPUTE) -> None:
    for rank in ranks:
        roster.ranks[rank].progress = progress(5, activity, seconds)


def commits(roster: Roster, **states: CommitState) -> None:
    for rank, state in roster.ranks.items():
        state.commit = states.get(f"r{rank}", CommitState(5))


def hang(roster: Roster, quiet: float) -> tuple[list[int | None], str]:
    roster.progress_at = NOW - quiet
    faults, reason = watch.find_hang(roster, NOW)
    return [fault.rank for fault in faults], reason


def test_a_rank_outside_a_collective_is_the_culprit_when_others_wait() -> None:
    roster = make()
    waiting(roster, 0, 1, 3, seconds=60)
    assert hang(roster, 61)[0] == [2]


def test_below_the_limit_nothing_hangs() -> None:
    roster = make()
    waiting(roster, 0, 1, 3, seconds=59)
    found, reason = hang(roster, 59)
    assert found == []
    assert "no step for 59 s of 60 s" in reason


def test_the_limit_is_ten_median_steps_when_that_is_longer() -> None:
    roster = make()
    roster.ranks[0].progress = progress(5, median=20.0)
    assert watch.hang_limit(roster) == 200.0


def test_a_rank_that_only_now_and_then_waits_is_still_the_culprit() -> None:
    roster = make()
    waiting(roster, 0, 1, 3, seconds=60)
    waiting(roster, 2, seconds=1)
    assert hang(roster, 61)[0] == [2]


def test_a_slow_job_in_which_nobody_waits_does_not_hang() -> None:
    assert hang(make(), 600)[0] == []


def test_when_all_ranks_wait_nobody_is_blamed_but_the_job_hangs() -> None:
    roster = make()
    waiting(roster, 0, 1, 2, 3, seconds=60)
    found, reason = hang(roster, 61)
    assert found == [None]
    assert "nobody can be blamed" in reason


def test_a_silent_rank_is_blamed_and_not_one_that_speaks() -> None:
    roster = make()
    waiting(roster, 0, 1, seconds=60)
    roster.ranks[3].heard_at = NOW - 59.9
    assert hang(roster, 61)[0] == [3]


def test_a_long_save_or_evaluation_is_no_hang() -> None:
    for activity in (Activity.SAVE, Activity.EVALUATE, Activity.SETUP, Activity.RECOVERY):
        roster = make()
        waiting(roster, 0, 1, 2, seconds=600)
        roster.ranks[3].progress = progress(5, activity)
        assert hang(roster, 601)[0] == [], activity


def test_a_rank_that_is_stopped_in_a_save_is_blamed_since_its_heartbeat_stopped() -> None:
    roster = make()
    waiting(roster, 0, 1, 2, seconds=60, activity=Activity.SAVE)
    roster.ranks[3].progress = progress(5, Activity.SAVE)
    roster.ranks[3].heard_at = NOW - 60
    assert hang(roster, 1)[0] == [3]


def test_a_silent_rank_that_nobody_waits_for_is_not_blamed() -> None:
    roster = make()
    roster.ranks[3].heard_at = NOW - 600
    assert hang(roster, 601)[0] == []


def test_a_first_step_may_take_longer() -> None:
    roster = make()
    roster.stepped = False
    waiting(roster, 0, 1, 3, seconds=100)
    assert hang(roster, 100)[0] == []
    waiting(roster, 0, 1, 3, seconds=301)
    assert hang(roster, 301)[0] == [2]


def test_silence_counts_as_loss_only_without_agent_and_when_somebody_misses_the_rank() -> None:
    roster = make()
    roster.ranks[2].heard_at = NOW - 10
    waiting(roster, 0, seconds=9)
    assert watch.find_lost(roster, NOW)[0] == ()
    roster.agents.clear()
    assert [fault.rank for fault in watch.find_lost(roster, NOW)[0]] == [2]
    waiting(roster, 0, seconds=1)
    assert watch.find_lost(roster, NOW)[0] == ()
    roster.faults.append(Fault(0, FaultKind.COLLATERAL, ""))
    assert [fault.rank for fault in watch.find_lost(roster, NOW)[0]] == [2]


def test_the_agent_of_a_dead_node_watches_nobody() -> None:
    roster = make()
    roster.agents[0].heard_at = NOW - 10
    for rank in (2, 3):
        roster.ranks[rank].heard_at = NOW - 10
    waiting(roster, 0, 1, seconds=9)
    assert [fault.rank for fault in watch.find_lost(roster, NOW)[0]] == [2, 3]


def test_the_target_is_the_last_step_when_nobody_has_passed_the_gate() -> None:
    roster = make()
    commits(roster, r0=CommitState(5, at_gate=6))
    assert targets.choose_target(roster)[0] == 5


def test_the_target_is_the_next_step_when_somebody_has_passed_the_gate() -> None:
    roster = make()
    at_gate = CommitState(5, at_gate=6)
    for passed in (CommitState(6), CommitState(5, updating=6)):
        commits(roster, r0=at_gate, r1=at_gate, r2=at_gate, r3=passed)
        target, reason = targets.choose_target(roster)
        assert target == 6
        assert "rank 3 has passed the gate" in reason


def test_the_next_step_may_have_a_later_number_when_iterations_are_left_out() -> None:
    roster = make()
    at_gate = CommitState(5, at_gate=8)
    commits(roster, r0=at_gate, r1=at_gate, r2=CommitState(8), r3=at_gate)
    assert targets.choose_target(roster)[0] == 8
    assert all(targets.reaches(roster.ranks[rank], 8) for rank in range(4))


def test_a_half_done_update_after_a_fault_of_the_ranks_own_is_no_sign_that_the_gate_was_passed() -> None:
    roster = make()
    roster.faults.append(Fault(3, FaultKind.MEMORY, ""))
    commits(roster, r3=CommitState(5, updating=6))
    targets.mark_unusable(roster)
    assert targets.choose_target(roster)[0] == 5
    assert roster.faulty() == (3,)


def test_when_the_next_step_is_not_covered_the_last_one_is_saved() -> None:
    roster = make()
    commits(roster, r0=CommitState(6))
    target, reason = targets.choose_target(roster)
    assert target == 5
    assert "no usable copy" in reason


def test_steps_are_never_mixed() -> None:
    roster = make()
    commits(roster, r0=CommitState(6), r2=CommitState(6))
    assert targets.choose_target(roster)[0] is None


def test_a_rank_without_a_fault_of_its_own_speaks_for_a_shard() -> None:
    roster = make()
    commits(roster)
    roster.faults.append(Fault(0, FaultKind.MEMORY, ""))
    sources, _ = targets.choose_sources(roster, 5)
    assert sources is not None
    assert [(source.replica_set.ranks, source.source) for source in sources] == [((0, 2), 2), ((1, 3), 1)]


def test_the_reason_names_the_faults_and_why_better_strategies_do_not_fit() -> None:
    roster = make(strategies=(Strategy.RETRY, Strategy.RESPAWN, Strategy.DUMP))
    roster.agents.clear()
    roster.ranks[1].lost = fault = Fault(1, FaultKind.PROCESS_DEATH, "signal 9")
    plan, reason = decide.choose_strategy(roster, [fault], NOW, excluded={})
    assert plan.strategy is Strategy.DUMP
    assert reason == (
        "dump after rank 1: process_death (signal 9); no retry: process_death is not cured by computing again; "
        "no respawn: no agent can restart rank 1 (without ttprun nobody starts a lost process anew)"
    )


@pytest.mark.parametrize("agents", [True, False])
def test_who_is_ended_by_another_launcher_reads_that_this_takes_ttprun(agents: bool) -> None:
    roster = make(strategies=(Strategy.RESPAWN, Strategy.DUMP))
    if not agents:
        roster.agents.clear()
    asked = [Fault(rank, FaultKind.TERMINATED, "SIGTERM") for rank in (0, 2, 3)]
    for managed in (True, False):
        reason = decide.choose_strategy(roster, asked, NOW, excluded={}, managed=managed)[1]
        assert "no respawn: terminated is not cured by a new process" in reason
        assert ("without ttprun" in reason) is (not agents and not managed)


def test_an_exception_is_no_matter_of_the_launcher() -> None:
    roster = make(strategies=(Strategy.RESPAWN, Strategy.DUMP))
    roster.agents.clear()
    reason = decide.choose_strategy(roster, [Fault(1, FaultKind.EXCEPTION, "")], NOW, excluded={})[1]
    assert "exception is not cured by a new process" in reason and "ttprun" not in reason


def test_a_dead_rank_that_an_agent_watches_is_respawned_when_all_offer_it() -> None:
    roster = make(strategies=(Strategy.RETRY, Strategy.RESPAWN, Strategy.DUMP))
    roster.ranks[1].lost = fault = Fault(1, FaultKind.PROCESS_DEATH, "")
    assert decide.choose_strategy(roster, [fault], NOW, excluded={})[0].strategy is Strategy.RESPAWN
    excluded = {Strategy.RESPAWN: "the restarts are used up"}
    plan, reason = decide.choose_strategy(roster, [fault], NOW, excluded=excluded)
    assert plan.strategy is Strategy.DUMP
    assert "the restarts are used up" in reason


def test_a_strategy_that_one_healthy_rank_does_not_offer_is_not_taken() -> None:
    roster = make(strategies=(Strategy.RETRY, Strategy.DUMP))
    ready = roster.ranks[2].ready
    assert ready is not None
    roster.ranks[2].ready = Ready(2, 0, ready.replica_sets, (Strategy.DUMP,))
    fault = Fault(1, FaultKind.NETWORK, "")
    assert decide.choose_strategy(roster, [fault], NOW, excluded={})[0].strategy is Strategy.DUMP


def test_a_request_to_end_is_never_retried() -> None:
    roster = make(strategies=(Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP))
    fault = Fault(None, FaultKind.TERMINATED, "SIGTERM")
    assert decide.choose_strategy(roster, [fault], NOW, excluded={})[0].strategy is Strategy.DUMP


def test_reload_fits_when_no_healthy_replica_is_left() -> None:
    roster = make(strategies=(Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP))
    faults = [Fault(rank, FaultKind.PROCESS_DEATH, "") for rank in (0, 2)]
    for fault in faults:
        assert fault.rank is not None
        roster.ranks[fault.rank].lost = fault
    assert decide.choose_strategy(roster, faults, NOW, excluded={})[0].strategy is Strategy.RELOAD


def at_the_start(roster: Roster) -> Roster:
    """No step was completed since the job started: a reload costs nothing."""
    for state in roster.ranks.values():
        assert state.ready is not None
        state.ready = msgspec.structs.replace(state.ready, start_step=5)
    return roster


def offers_reload_without_restarts(*ranks: int) -> Roster:
    roster = at_the_start(make(strategies=(Strategy.RETRY, Strategy.RELOAD, Strategy.DUMP)))
    for rank in ranks:
        ready = roster.ranks[rank].ready
        assert ready is not None
        roster.ranks[rank].ready = msgspec.structs.replace(ready, restarts=False)
    return roster


def test_a_job_that_starts_no_process_anew_saves_when_one_is_lost() -> None:
    fault = Fault(1, FaultKind.PROCESS_DEATH, "killed")
    for ranks in ((), (0, 1, 2, 3), (3,), (1,)):
        roster = offers_reload_without_restarts(*ranks)
        roster.ranks[1].lost = fault
        plan, reason = decide.choose_strategy(roster, [fault], NOW, excluded={})
        assert plan.strategy is (Strategy.DUMP if ranks else Strategy.RELOAD)
        assert ("no reload: rank 1 would need a new process, and this job starts none" in reason) is bool(ranks)


def test_a_job_that_starts_no_process_anew_loads_while_all_are_there() -> None:
    fault = Fault(1, FaultKind.MEMORY, "bits")
    roster = offers_reload_without_restarts(0, 1, 2, 3)
    plan, _ = decide.choose_strategy(roster, [fault], NOW, excluded={Strategy.RETRY: "it has failed"})
    assert (plan.strategy, plan.lost) == (Strategy.RELOAD, ())


def test_with_the_switch_of_the_controller_off_only_what_needs_no_new_process_is_chosen() -> None:
    lost, memory = Fault(1, FaultKind.PROCESS_DEATH, "killed"), Fault(1, FaultKind.MEMORY, "bits")
    for fault, managed, expected in (
        (lost, False, Strategy.DUMP),
        (memory, False, Strategy.RELOAD),
        (memory, True, Strategy.DUMP),  # a cluster manager understands that it is to start processes
    ):
        roster = at_the_start(make(strategies=(Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP)))
        roster.options = replace(roster.options, restarts=False)
        roster.ranks[1].lost = fault if fault is lost else None
        plan, _ = decide.choose_strategy(roster, [fault], NOW, excluded={}, managed=managed)
        assert plan.strategy is expected


def saw(rank: int, peer: str) -> Fault:
    return Fault(rank, FaultKind.COLLATERAL, f"RuntimeError: Read error [{peer}]:1944: Connection reset by peer")


def test_ranks_that_saw_a_connection_break_are_not_blamed_for_it() -> None:
    words = decide.summary([saw(2, "127.0.0.1"), saw(0, "127.0.0.1"), saw(3, "127.0.0.1")])
    assert words.startswith("connections between ranks broke, which rank is to blame is not known (seen by ranks 0, 2")
    assert "the host" not in words and "Connection reset by peer" in words


def test_the_host_that_most_of_them_name_is_told() -> None:
    faults = [saw(0, "10.0.0.7"), saw(1, "10.0.0.7"), saw(6, "10.0.0.1"), saw(2, "10.0.0.7")]
    assert "(seen by ranks 0, 1, 2, 6, most of which name the host 10.0.0.7: " in decide.summary(faults)


def test_a_rank_that_reports_its_own_link_is_named() -> None:
    faults = [Fault(1, FaultKind.NETWORK, "UB LINK ERROR"), saw(2, "10.0.0.7")]
    assert decide.summary(faults).startswith("rank 1: network (UB LINK ERROR); connections between ranks broke")


def test_who_is_blamed_for_a_failed_dump() -> None:
    def failed(rank: int, collateral: bool = False) -> Failed:
        return Failed(rank, 1, Phase.DUMP, "x", collateral)

    everybody = (0, 1, 2)
    assert [one.rank for one in decide.blamed_for_dump([failed(1)], everybody)] == [1]
    assert [one.rank for one in decide.blamed_for_dump([failed(1, True), failed(2)], everybody)] == [2]
    assert [one.rank for one in decide.blamed_for_dump([failed(2), failed(1), failed(0)], everybody)] == [2]
    assert [one.rank for one in decide.blamed_for_dump([failed(2, True), failed(1, True)], everybody)] == [2, 1]


def test_what_many_ranks_report_alike_is_told_once() -> None:
    faults = [Fault(rank, FaultKind.EXCEPTION, "AssertionError: lr") for rank in (2, 0, 1)]
    faults.append(Fault(3, FaultKind.PROCESS_DEATH, "signal 9"))
    assert decide.summary(faults) == "ranks 0, 1, 2: exception (AssertionError: lr); rank 3: process_death (signal 9)"
    assert decide.summary([Fault(None, FaultKind.TERMINATED, "SIGTERM")]) == "the job: terminated (SIGTERM)"
