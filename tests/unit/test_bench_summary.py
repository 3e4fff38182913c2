"""The numbers of the benchmark are medians of ratios of neighbours."""

from __future__ import annotations

import json

import pytest
from bench.summary import overhead, ratio, summarize


def test_a_summary_has_the_median_the_extremes_and_the_number_of_runs() -> None:
    summary = summarize([3.0, 1.0, 2.0, 10.0], "s")
    assert (summary.median, summary.minimum, summary.maximum, summary.runs) == (2.5, 1.0, 10.0, 4)


def test_a_machine_that_gets_slower_and_slower_does_not_change_an_overhead() -> None:
    slowness = [1.0, 1.5, 4.0, 9.0, 20.0]
    found = overhead([1.01 * one for one in slowness], slowness)
    assert found.median == pytest.approx(0.01)
    assert found.maximum == pytest.approx(0.01)
    assert found.unit == "fraction"


def test_a_ratio_compares_each_run_with_its_neighbour() -> None:
    assert ratio([2.0, 30.0, 4.0], [1.0, 10.0, 4.0]).median == pytest.approx(2.0)


def test_runs_without_a_neighbour_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_no_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="no runs"):
        summarize([], "s")


@pytest.mark.parametrize(
    ("count", "first"),
    # Sign test at 5 %: the largest r with P(Binomial(n, 1/2) < r) <= 2.5 %, e.g. 6 of 20 (tables of the sign test).
    [(1, 1), (5, 1), (6, 1), (9, 2), (20, 6), (100, 40)],
)
def test_the_interval_of_the_median_is_that_of_the_sign_test(count: int, first: int) -> None:
    summary = summarize([float(value) for value in range(1, count + 1)], "s")
    assert (summary.low, summary.high) == (first, count + 1 - first)


def test_one_wild_run_does_not_move_the_interval() -> None:
    calm = summarize([float(value) for value in range(20)], "s")
    wild = summarize([*(float(value) for value in range(19)), 1e9], "s")
    assert (calm.low, calm.high) == (wild.low, wild.high)


def test_the_object_in_the_file_holds_what_its_readers_look_for() -> None:
    found = json.loads(json.dumps(summarize([0.5, 1.5], "s").as_json()))
    assert {"median": 1.0, "minimum": 0.5, "maximum": 1.5, "runs": 2, "unit": "s"}.items() <= found.items()


@pytest.mark.parametrize(
    ("unit", "value", "text"),
    [("fraction", 0.004, "+0.40 %"), ("ratio", 1.25, "1.25 x"), ("s", 0.0021, "2.100 ms"), ("s", 2.1, "2.10 s")],
)
def test_people_read_units(unit: str, value: float, text: str) -> None:
    assert summarize([value], unit).shown()[0] == text
