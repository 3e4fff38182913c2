from __future__ import annotations

import dataclasses

import msgspec
from support.control import progress, register

from mindio_tft_patch.controller.options import Options
from mindio_tft_patch.controller.roster import Fault, Roster, named
from mindio_tft_patch.protocol.messages import Ready, Register, ReplicaSet, Role
from mindio_tft_patch.protocol.phases import Activity, FaultKind


def make() -> Roster:
    roster = Roster(Options(world_size=4))
    roster.register(register(1), 100.0)
    return roster


def refusal(roster: Roster, message: Register, now: float = 100.5, *, same: bool = False) -> str:
    found = roster.refusal(message, now, same_connection=same)
    return "" if found is None else found.reason


def test_a_second_process_may_not_claim_a_live_rank() -> None:
    assert "is registered and alive (process 101)" in refusal(make(), register(1, pid=7))


def test_the_same_process_may_register_again() -> None:
    assert refusal(make(), register(1)) == ""


def test_a_new_process_may_take_a_dead_or_silent_rank() -> None:
    roster = make()
    assert refusal(roster, register(1, pid=7), now=110.0) == ""
    roster.ranks[1].lost = Fault(1, FaultKind.PROCESS_DEATH, "")
    assert refusal(roster, register(1, pid=7)) == ""
    roster.register(register(1, pid=7), 101.0)
    assert roster.ranks[1].lost is None


def test_a_refusal_because_of_a_live_process_may_pass_and_others_do_not() -> None:
    roster = make()
    alive = roster.refusal(register(1, pid=7), 100.5, same_connection=False)
    assert alive is not None and alive.passing
    for wrong in (register(9, 4), register(1, 8)):
        found = roster.refusal(wrong, 100.5, same_connection=False)
        assert found is not None and not found.passing


def test_a_rank_that_has_left_training_cannot_be_claimed() -> None:
    roster = make()
    roster.ranks[1].finished = True
    assert "has left training in good order" in refusal(roster, register(1, pid=7), now=900.0)


def test_a_process_with_the_same_number_in_a_container_that_was_started_again_is_another_one() -> None:
    roster = make()
    again = msgspec.structs.replace(register(1), life="b")
    assert "is registered and alive" in refusal(roster, again)
    roster.ranks[1].lost = Fault(1, FaultKind.HEARTBEAT_LOST, "")
    assert roster.register(again, 101.0)
    assert roster.ranks[1].returning


def test_a_new_process_is_returning_when_the_one_before_it_was_lost_or_had_been_ready() -> None:
    roster = make()
    roster.register(register(1, pid=7), 110.0)
    assert not roster.ranks[1].returning
    roster.ranks[1].ready = Ready(1, 0, (ReplicaSet("dense", (1, 3)),), ())
    roster.register(register(1, pid=8), 120.0)
    assert roster.ranks[1].returning
    assert not roster.ranks[1].healthy and roster.ranks[1].trained
    # What the shard of the rank is stays known while its new process sets itself up.
    assert [found.ranks for found in roster.replica_sets()] == [(1, 3)]
    roster.forget_recovery()
    assert not roster.ranks[1].returning


def test_an_agent_is_returning_when_ranks_of_its_node_were_known() -> None:
    roster = make()
    for ranks, returning in (((0,), False), ((0, 1), True)):
        one = Register(Role.AGENT, -1, 4, 50, "a", 0, ranks)
        assert roster.register(one, 100.0)
        assert not roster.register(one, 101.0)
        assert roster.register(msgspec.structs.replace(one, pid=51), 110.0)
        assert roster.agents[0].returning is returning
        roster.agents.clear()


def test_another_version_another_job_or_an_unknown_rank_is_refused() -> None:
    roster = make()
    assert "version 99" in refusal(roster, msgspec.structs.replace(register(0), version=99))
    assert "its job has 8 ranks, this one 4" in refusal(roster, register(0, world_size=8))
    for rank in (-1, 4, 10**9):
        assert f"rank {rank} is not from 0 to 3" in refusal(roster, msgspec.structs.replace(register(0), rank=rank))
    assert "rank 9 is not" in refusal(roster, Register(Role.AGENT, -1, 4, 1, "a", 0, (3, 9)))


def test_a_second_agent_may_not_claim_a_node_with_a_live_one() -> None:
    roster = make()
    one = Register(Role.AGENT, -1, 4, 50, "a", 0, (0, 1))
    roster.register(one, 100.0)
    other = msgspec.structs.replace(one, pid=51)
    assert "live agent" in refusal(roster, other)
    assert refusal(roster, one) == ""
    assert refusal(roster, other, now=110.0) == ""


def test_long_work_counts_as_progress_and_computing_does_not() -> None:
    roster = make()
    state = roster.ranks[1]
    roster.note_progress(state, progress(5), 100.0)
    roster.note_progress(state, progress(5), 101.0)
    assert roster.progress_at == 100.0
    assert not roster.stepped
    roster.note_progress(state, progress(5, Activity.SAVE), 102.0)
    assert roster.progress_at == 102.0
    roster.note_progress(state, progress(6), 103.0)
    assert roster.progress_at == 103.0
    assert roster.stepped


def test_ranks_in_words() -> None:
    assert (named([3]), named([2, 1]), named([])) == ("rank 3", "ranks 1, 2", "ranks none")


def test_options_hold_every_duration_in_seconds() -> None:
    no_durations = {"world_size", "heartbeats_missed", "restart_budget", "restarts"}
    numbers = {one.name for one in dataclasses.fields(Options)} - no_durations
    assert all(name.endswith("_seconds") for name in numbers)
