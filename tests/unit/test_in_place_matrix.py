"""The matrix of faults in place: a seed stands for one sample, nothing of importance is missing, schedules hold."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support import in_place_matrix as matrix
from support.in_place_matrix import KINDS, MOMENTS, Case, Packed

from mindio_tft_patch.fault_injection import MOMENTS as KNOWN_MOMENTS
from mindio_tft_patch.fault_injection import PlannedFault, known_kinds, read_schedule

EVERYTHING = matrix.selected({"TFT_MATRIX": "all"})


def cases_of(jobs: list[Packed]) -> list[Case]:
    return [case for packed in jobs for case, _ in packed.cases]


@pytest.mark.parametrize("seed", [1, 2, matrix.DEFAULT_SEED])
def test_the_default_size_covers_every_kind_moment_rank_and_variant(seed: int) -> None:
    jobs = matrix.selected({"TFT_MATRIX_SEED": str(seed)})
    cases = cases_of(jobs)
    assert len(cases) == matrix.DEFAULT_SIZE >= 60 and len(jobs) <= 24
    assert {case.kind.name for case in cases} == set(KINDS)
    assert {case.moment.name for case in cases} == set(MOMENTS)
    assert {case.variant for case in cases} == set(matrix.VARIANTS)
    assert {(case.topology, case.rank) for case in cases} == {
        (topology, rank) for topology in matrix.TOPOLOGIES for rank in range(matrix.RANKS)
    }


def test_a_sample_has_few_of_the_slow_cases() -> None:
    cases = cases_of(matrix.selected({}))
    assert 0 < sum(case.kind.hangs for case in cases) <= 4 and 0 < sum(case.alone for case in cases) <= 5


def test_a_seed_stands_for_one_sample_and_another_for_another() -> None:
    schedules = [
        [packed.schedule for packed in matrix.selected({"TFT_MATRIX_SEED": seed, "TFT_IN_PLACE_SIZE": "20"})]
        for seed in ("7", "7", "8")
    ]
    assert schedules[0] == schedules[1] != schedules[2]


def test_everything_is_every_combination_once() -> None:
    cases = cases_of(EVERYTHING)
    combinations = {(case.topology, case.rank, case.kind.name, case.moment.name) for case in cases}
    assert len(cases) == len(combinations)
    pairs = {(kind.name, moment) for kind in KINDS.values() for moment in kind.moments}
    assert {(kind, moment) for _, _, kind, moment in combinations} == pairs
    assert len(combinations) > 3000


def test_what_shares_a_job_is_apart_and_the_same_job() -> None:
    for packed in EVERYTHING:
        steps = [step for _, step in packed.cases]
        assert all(later - earlier >= 2 for earlier, later in pairwise(steps))
        assert {case.job for case, _ in packed.cases} == {packed.job}
        assert len(packed.cases) == 1 or not any(case.alone for case, _ in packed.cases)
        assert all(1 <= step <= matrix.ITERATIONS and step in case.moment.steps for case, step in packed.cases)


def test_names_are_those_of_the_injector() -> None:
    assert set(KINDS) <= set(known_kinds())
    planned = {fault.moment for packed in EVERYTHING for fault in read_schedule(packed.schedule)}
    assert planned <= set(KNOWN_MOMENTS)


def test_a_schedule_has_the_fault_and_what_it_needs_of_others() -> None:
    case = Case("dp4", "bf16", 1, KINDS["sigkill"], MOMENTS["gate_half"])
    assert read_schedule(case.schedule(7)) == (
        PlannedFault(rank=1, step=7, moment="after_gate", kind="sigkill", delay=0.5),
        PlannedFault(rank=0, step=7, moment="barrier", kind="collateral"),
        PlannedFault(rank=3, step=7, moment="barrier", kind="collateral"),
    )


def test_moments_stay_where_they_exist() -> None:
    cases = cases_of(EVERYTHING)
    assert not [case for case in cases if case.moment.updates and case.variant == "fp16"]
    readers = {case.rank for case in cases if case.topology == "tp2dp2" and case.moment.name == "loader"}
    assert readers == {0, 2}


def test_every_end_of_a_job_has_its_reason() -> None:
    for case in cases_of(EVERYTHING):
        assert (case.strategy == "dump") == case.alone == bool(case.kind.why_the_end or case.moment.why_the_end)
