"""Twenty faults in one job: it ends bit-equal, and what its processes hold does not grow from recovery to recovery."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
from support.compare import differences_in_place
from support.in_place_matrix import FLAGS
from support.jobs import RANKS, Job

from mindio_tft_patch.fault_injection import PlannedFault, read_schedule
from mindio_tft_patch.random_faults import EVERY_STEP, random_schedule

if TYPE_CHECKING:
    from faults.conftest import Starter, UnbrokenRuns

pytestmark = pytest.mark.timeout(600)

STEPS, FAULTS, SEED = 60, 20, 20261129
# Tensor-parallel groups beside data-parallel ones: more groups to rebuild. Of two such ranks one reads for both, so
# that not every rank comes to "loader".
JOB: dict[str, Any] = {"tp": 2, "train_iters": STEPS, "eval_interval": 1000, "save_interval": 1000, "extra": FLAGS}
LOSING = ("sigkill", "exit")
KINDS = (
    *LOSING,
    "memory_parameters",
    "memory_main_parameters",
    "memory_moments",
    "memory_gradients",
    "memory_activations",
    "broken_sockets",
)
MOMENTS = tuple(moment for moment in EVERY_STEP if moment != "loader")

# A process grows while it touches memory and opens connections for the first time; then it must stay as it is.
WARM_UP, SAMPLES = 4, 4  # recoveries
TOLERANCE = {"bytes": 16e6, "threads": 1.0, "descriptors": 2.0, "groups": 0.0}


def test_twenty_faults_in_one_job(starter: Starter, unbroken_runs: UnbrokenRuns) -> None:
    schedule = schedule_with_a_survivor()
    expected = unbroken_runs.of(starter, **JOB)
    blanks = RANKS + sum(fault.kind in LOSING for fault in read_schedule(schedule)) + 2
    job = starter.start("job", schedule, blanks=blanks, environ={"TFT_TEST_RESOURCES": "1"}, **JOB)
    job.wait(500.0)
    assert job.code == 0, job.story()
    records = job.records()
    assert len(records) == FAULTS, job.story()
    assert all(record["recomputed_steps"] == 0 for record in records)
    assert differences_in_place(expected, job) == [], job.story()
    assert job.left_over() == []

    veterans = [rank for rank in range(RANKS) if len(job.processes(rank)) == 1]
    assert veterans
    steps = [record["step"] for record in records]
    growth = [f"rank {rank}: {words}" for rank in veterans for words in growth_of(samples_after(job, rank, steps))]
    assert growth == []


def schedule_with_a_survivor() -> str:
    """The first schedule, from SEED on, in which a rank lives through everything and has a fault of its own."""
    for seed in itertools.count(SEED):
        schedule = random_schedule(seed, FAULTS, RANKS, STEPS, kinds=KINDS, moments=MOMENTS)
        faults = read_schedule(schedule)
        losing = [fault for fault in faults if fault.kind in LOSING]
        lost = {fault.rank for fault in losing}
        if len(losing) >= 5 and any(_mended(fault, lost) for fault in faults):
            return schedule
    raise AssertionError("itertools.count has ended")


def _mended(fault: PlannedFault, lost: set[int]) -> bool:
    return fault.rank not in lost and fault.kind.startswith("memory")


def samples_after(job: Job, rank: int, steps: list[int]) -> list[Mapping[str, float]]:
    """What the process of a rank held at the beginning of the second step after each recovery."""
    lines = (job.folder / "trace" / f"resources-{rank}.jsonl").read_text().splitlines()
    by_step = {sample["step"]: sample for sample in map(json.loads, lines)}
    return [by_step[step + 1] for step in steps if step + 1 in by_step]


def growth_of(samples: list[Mapping[str, float]]) -> list[str]:
    """What grew, in words."""
    assert len(samples) >= WARM_UP + 2 * SAMPLES, f"only {len(samples)} samples"
    first, last = samples[WARM_UP : WARM_UP + SAMPLES], samples[-SAMPLES:]
    found = []
    for name, tolerance in TOLERANCE.items():
        before, after = (statistics.mean(one[name] for one in some) for some in (first, last))
        if after - before > tolerance:
            found.append(f"{name} grew from {before:.1f} to {after:.1f}: {[one[name] for one in samples]}")
    return found
