"""Which ranks a launcher starts anew, and what it counts."""

from __future__ import annotations

from collections import Counter

from mindio_tft_patch.launch.in_place import InPlace
from mindio_tft_patch.launch.report import recovery_lines
from mindio_tft_patch.launch.vigil import Vigil
from mindio_tft_patch.protocol.messages import Do, Plan
from mindio_tft_patch.protocol.phases import Phase, Strategy


def do(attempt: int, phase: Phase, *lost: int, strategy: Strategy = Strategy.RESPAWN) -> Do:
    return Do(attempt, phase, Plan(strategy, "because", lost=lost))


def of(*ranks: int, attempt: int = 0) -> tuple[InPlace, Counter[Strategy]]:
    counts: Counter[Strategy] = Counter()
    return InPlace(ranks, attempt, counts), counts


def test_a_lost_rank_is_started_at_the_first_command_of_an_attempt_and_not_again() -> None:
    in_place, _ = of(0, 1, 2)
    assert in_place.take(do(1, Phase.STOP, 2)) == (2,)
    assert in_place.take(do(1, Phase.CLEAN, 2)) == ()
    assert in_place.take(do(1, Phase.RESUME, 2)) == ()


def test_a_command_that_was_missed_is_made_up_for_by_the_next_phase() -> None:
    in_place, _ = of(0, 1)
    assert in_place.take(do(1, Phase.CLEAN, 1)) == (1,)


def test_the_same_rank_is_started_again_by_the_next_attempt_that_names_it() -> None:
    in_place, _ = of(0, 1)
    in_place.take(do(1, Phase.STOP, 1))
    assert in_place.take(do(2, Phase.STOP)) == ()
    assert in_place.take(do(3, Phase.STOP, 1)) == (1,)


def test_ranks_of_other_nodes_are_somebody_elses() -> None:
    in_place, _ = of(2, 3)
    assert in_place.take(do(1, Phase.STOP, 0, 3)) == (3,)


def test_the_ranks_of_a_launcher_that_came_back_are_what_the_attempt_waits_for() -> None:
    in_place, _ = of(2, 3, attempt=4)
    assert in_place.take(do(4, Phase.REBUILD, 2, 3)) == ()
    assert in_place.take(do(5, Phase.STOP, 2)) == (2,)


def test_nobody_is_started_for_a_job_that_ends() -> None:
    in_place, counts = of(0, 1)
    assert in_place.take(do(1, Phase.STOP, 1, strategy=Strategy.DUMP)) == ()
    assert not counts


def test_a_recovery_counts_once_when_training_goes_on() -> None:
    in_place, counts = of(0, 1)
    in_place.take(do(1, Phase.STOP, 1))
    assert in_place.recovering and not counts
    for attempt, strategy in ((1, Strategy.RESPAWN), (2, Strategy.RETRY), (3, Strategy.RESPAWN)):
        in_place.take(do(attempt, Phase.RESUME, strategy=strategy))
        in_place.take(do(attempt, Phase.RESUME, strategy=strategy))
    assert not in_place.recovering
    assert recovery_lines(counts) == ["recoveries in place: 3 (retry 1, respawn 2)"]
    assert recovery_lines(Counter()) == []


# ---------------------------------------------------------------------- the vigil over a job that is repaired


def vigil() -> Vigil:
    return Vigil(0.0, 120.0, alone=True)


def test_a_vigil_is_broken_off_when_every_missing_rank_has_a_new_process() -> None:
    one = vigil()
    assert not one.repaired(set()), "nobody has said yet what is to be done"
    one.command(1.0, do(1, Phase.STOP, 2))
    assert not one.repaired({2})
    assert one.repaired(set())


def test_a_command_of_a_recovery_that_began_before_the_death_does_not_end_the_vigil() -> None:
    one = vigil()
    one.command(1.0, do(1, Phase.REBUILD, 2))
    assert not one.repaired({3})


def test_a_vigil_is_not_broken_off_once_the_job_is_to_end() -> None:
    asked, ordered, lonely, late = vigil(), vigil(), vigil(), vigil()
    asked.ask_to_end()
    ordered.command(1.0, do(2, Phase.STOP, strategy=Strategy.DUMP))
    lonely.lose_controller(1.0, "gone")
    late.next_step(121.0, {0})
    for one in (asked, ordered, lonely, late):
        one.command(122.0, do(3, Phase.STOP))
        assert not one.repaired(set())
