"""The sample of the fault matrix: the same for the same seed, and nothing of importance is missing."""

from __future__ import annotations

import pytest
from support import matrix


@pytest.mark.parametrize("seed", [1, 2, matrix.DEFAULT_SEED])
def test_the_default_size_covers_every_moment_topology_rank_and_variant(seed: int) -> None:
    cases = matrix.sample(matrix.every_case(seed), matrix.DEFAULT_SIZE)
    assert len(cases) == matrix.DEFAULT_SIZE >= 24
    assert {case.moment for case in cases} == set(matrix.MOMENTS)
    assert {(case.topology, case.rank) for case in cases} == {
        (topology, rank) for topology in matrix.TOPOLOGIES for rank in range(matrix.RANKS)
    }
    assert {case.variant for case in cases} == set(matrix.VARIANTS)


def test_a_seed_stands_for_one_sample_and_another_for_another() -> None:
    names = [[case.name for case in matrix.selected({"TFT_MATRIX_SEED": seed})] for seed in ("7", "7", "8")]
    assert names[0] == names[1] != names[2]


def test_everything_is_every_rank_at_every_moment_in_every_topology() -> None:
    cases = matrix.selected({"TFT_MATRIX": "all"})
    assert len(cases) == len(set(cases)) == len(matrix.TOPOLOGIES) * matrix.RANKS * len(matrix.MOMENTS)


def test_variants_stay_where_they_make_sense() -> None:
    cases = matrix.every_case(3)
    assert {case.topology for case in cases if case.variant == "virtual"} == {"pp2dp2"}
