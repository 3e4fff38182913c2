"""Random schedules depend on their seed alone, and fit into the job."""

from __future__ import annotations

import itertools

import pytest

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.fault_injection import read_schedule
from mindio_tft_patch.random_faults import random_schedule


def test_the_same_seed_gives_the_same_schedule_and_another_one_another() -> None:
    assert random_schedule(1, 5, 4, 60) == random_schedule(1, 5, 4, 60)
    assert random_schedule(1, 5, 4, 60) != random_schedule(2, 5, 4, 60)


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_apart_in_order_and_before_the_last_step(seed: int) -> None:
    steps = [fault.step for fault in read_schedule(random_schedule(seed, 20, 4, 60, spacing=2))]
    assert len(steps) == 20 and min(steps) > 0 and max(steps) < 60
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(steps))


def test_every_rank_has_its_turn() -> None:
    assert {fault.rank for fault in read_schedule(random_schedule(0, 20, 4, 60))} == {0, 1, 2, 3}


def test_it_is_as_tight_as_it_can_be() -> None:
    assert [fault.step for fault in read_schedule(random_schedule(0, 3, 4, 6, spacing=2))] == [1, 3, 5]
    with pytest.raises(ConfigError, match="do not fit"):
        random_schedule(0, 3, 4, 5, spacing=2)


@pytest.mark.parametrize("wrong", [{"kinds": ["meteor"]}, {"moments": ["lunch"]}, {"kinds": []}, {"spacing": 0}])
def test_nonsense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        random_schedule(0, 2, 4, 60, **wrong)  # type: ignore[arg-type]
