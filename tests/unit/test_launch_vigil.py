"""The rules by which a launcher leaves ranks alone or ends them."""

from __future__ import annotations

from mindio_tft_patch.launch.vigil import (
    EXIT_GRACE_SECONDS,
    FAULTY_GRACE_SECONDS,
    KILL_GRACE_SECONDS,
    TERM_GRACE_SECONDS,
    VERDICT_SECONDS,
    Move,
    Vigil,
)
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import Phase, Strategy

OT = 120.0


def do(phase: Phase, strategy: Strategy = Strategy.DUMP, faulty: tuple[int, ...] = ()) -> Do:
    return Do(1, phase, Plan(strategy, "because", faulty=faulty))


def test_survivors_are_left_alone_until_the_time_for_the_dump_is_over() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    assert vigil.next_step(0.0, {0, 1}).move is Move.WAIT
    assert vigil.next_step(OT - 0.01, {0, 1}).move is Move.WAIT
    step = vigil.next_step(OT, {0, 1})
    assert (step.move, step.ranks) == (Move.TERMINATE, {0, 1})
    assert vigil.out_of_time


def test_a_rank_that_ignores_sigterm_is_killed_and_one_stuck_in_the_kernel_is_given_up() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.next_step(OT, {0, 1})
    assert vigil.next_step(OT + 0.1, {1}).move is Move.WAIT
    step = vigil.next_step(OT + TERM_GRACE_SECONDS, {1})
    assert (step.move, step.ranks) == (Move.KILL, {1})
    assert vigil.next_step(OT + TERM_GRACE_SECONDS + 1, {1}).move is Move.WAIT
    assert vigil.next_step(OT + TERM_GRACE_SECONDS + KILL_GRACE_SECONDS, {1}).move is Move.OVER


def test_after_exit_ranks_get_the_time_to_tear_down_and_no_more() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.command(5.0, do(Phase.EXIT))
    assert vigil.next_step(5.0 + EXIT_GRACE_SECONDS - 0.1, {0}).move is Move.WAIT
    assert vigil.next_step(5.0 + EXIT_GRACE_SECONDS, {0}).move is Move.TERMINATE
    assert not vigil.out_of_time


def test_the_vigil_is_over_when_all_have_ended_and_the_reason_is_known() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.command(1.0, do(Phase.EXIT))
    assert vigil.next_step(1.1, set()).move is Move.OVER


def test_a_node_without_ranks_waits_for_the_dump_of_the_other_nodes() -> None:
    vigil = Vigil(0.0, OT, alone=False)
    assert vigil.next_step(OT - 1, set()).move is Move.WAIT
    vigil.command(OT - 1, do(Phase.EXIT))
    assert vigil.next_step(OT - 0.9, set()).move is Move.OVER


def test_a_job_on_one_node_without_ranks_waits_for_the_reason_only_shortly() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    assert vigil.next_step(1.0, set()).move is Move.WAIT
    assert vigil.next_step(1.0 + VERDICT_SECONDS, set()).move is Move.OVER


def test_a_faulty_rank_is_killed_once_ahead_of_the_others() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.command(0.0, do(Phase.STOP, faulty=(2,)))
    assert vigil.next_step(0.0, {0, 2}).until == FAULTY_GRACE_SECONDS
    step = vigil.next_step(FAULTY_GRACE_SECONDS, {0, 2})
    assert (step.move, step.ranks) == (Move.KILL, {2})
    assert vigil.next_step(FAULTY_GRACE_SECONDS + 0.1, {0, 2}).move is Move.WAIT


def test_a_faulty_rank_of_another_node_is_none_of_our_business() -> None:
    vigil = Vigil(0.0, OT, alone=False)
    vigil.command(0.0, do(Phase.STOP, faulty=(9,)))
    assert vigil.next_step(5.0, {0, 1}).move is Move.WAIT


def test_a_repair_in_place_kills_nobody() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.command(0.0, do(Phase.STOP, Strategy.RETRY, faulty=(1,)))
    assert vigil.next_step(5.0, {0, 1}).move is Move.WAIT


def test_asking_twice_kills_at_once() -> None:
    vigil = Vigil(0.0, OT, alone=True)
    vigil.hurry(3.0)
    step = vigil.next_step(3.0, {0, 1})
    assert (step.move, step.ranks) == (Move.KILL, {0, 1})


def test_without_a_controller_ranks_are_ended_at_once_and_the_reason_is_kept() -> None:
    vigil = Vigil(0.0, OT, alone=False)
    vigil.lose_controller(0.0, "the controller is gone")
    assert vigil.next_step(0.0, {4}).move is Move.TERMINATE
    assert vigil.next_step(0.5, set()).move is Move.OVER
    assert vigil.controller_lost == "the controller is gone"
