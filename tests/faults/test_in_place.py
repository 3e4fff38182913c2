"""Faults of every kind, at every moment, in every job: the job stays up and ends as if nothing had happened.

`TFT_MATRIX=all` runs every combination; otherwise a sample, see support.in_place_matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import in_place_matrix as matrix
from support.compare import differences_in_place, differences_of_logs, differences_of_runs
from support.folders import tracked
from support.in_place_matrix import Packed
from support.jobs import Job
from support.matrix import trains

if TYPE_CHECKING:
    from faults.conftest import Starter, UnbrokenRuns

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(600)]

WAIT_SECONDS = 300.0
JOBS = matrix.selected()
# An older Megatron gets every third of them, so that a run with both stays affordable.
PAIRS = [(packed, "0.19") for packed in JOBS]
PAIRS += [(packed, "0.12") for packed in JOBS[::3] if trains(*packed.job, "0.12")]
LASTING = [pair for pair in PAIRS if not pair[0].ends]
ENDING = [pair for pair in PAIRS if pair[0].ends]


def _ids(pairs: list[tuple[Packed, str]]) -> list[str]:
    return [f"{packed.name}-{version}" for packed, version in pairs]


@pytest.mark.parametrize(("packed", "megatron"), LASTING, ids=_ids(LASTING), indirect=["megatron"])
def test_a_job_shrugs_off(packed: Packed, megatron: str, starter: Starter, unbroken_runs: UnbrokenRuns) -> None:
    gpt = matrix.arguments(packed.job, megatron)
    expected = unbroken_runs.of(starter, **gpt)
    options = ("--standalone", *(["--standby"] if packed.standby else []))
    job = starter.start("job", packed.schedule, environ=packed.environ, options=options, **gpt)
    job.wait(WAIT_SECONDS)
    assert job.code == 0, job.story()
    check_records(job, packed)
    assert differences_in_place(expected, job) == [], job.story()
    check_processes(job, packed)
    check_saves(starter.save)


def check_records(job: Job, packed: Packed) -> None:
    """One recovery for each fault, of the documented kind, and no step is lost."""
    wanted = [
        {
            "strategy": case.strategy,
            "ranks": [case.rank] if case.kind.refills else [],
            "restarted": [case.rank] if case.strategy == "respawn" else [],
            "step": case.target(step),
            "recomputed_steps": 0,
        }
        for case, step in packed.cases
    ]
    found = [{key: record[key] for key in wanted[0]} for record in job.records()]
    assert found == wanted, job.story()
    assert job.reported("recoveries in place").startswith(f"{len(wanted)} (")


def check_processes(job: Job, packed: Packed) -> None:
    """Only processes with a fault that ends them were replaced, and nothing is left of any."""
    started = [len(job.processes(rank)) for rank in range(matrix.RANKS)]
    assert started == [1 + packed.lost(rank) for rank in range(matrix.RANKS)]
    assert job.left_over() == []


def check_saves(save: Path) -> None:
    """Every periodic save was made, and nothing else."""
    assert {path.name for path in save.iterdir() if path.is_dir()} == {f"iter_{step:07d}" for step in matrix.SAVED}
    assert tracked(save) == matrix.ITERATIONS
    assert not list(save.glob(".tft-*"))


@pytest.mark.parametrize(("packed", "megatron"), ENDING, ids=_ids(ENDING), indirect=["megatron"])
def test_a_job_that_cannot_go_on_saves_its_last_step(
    packed: Packed, megatron: str, starter: Starter, unbroken_runs: UnbrokenRuns
) -> None:
    gpt = matrix.arguments(packed.job, megatron)
    expected = unbroken_runs.of(starter, **gpt)
    ((case, at),) = packed.cases
    step = case.target(at)

    broken = starter.start("broken", packed.schedule, **gpt)
    assert broken.wait(WAIT_SECONDS) == 1, broken.story()
    (record,) = broken.records()
    assert record["strategy"] == "dump" and record["step"] == step, broken.story()
    assert record["fault"][0]["rank"] == case.rank and record["restarted"] == []
    # A rank that lives through an exception outside of its update holds a good copy like others.
    assert set(record["ranks"]) <= {case.rank}
    assert tracked(starter.save) == step
    assert broken.left_over() == []

    resumed = starter.run("resumed", **gpt)
    assert resumed.code == 0, resumed.story()
    differing = differences_of_runs(expected, resumed)
    if step == matrix.ITERATIONS:  # nothing is left to be trained: no iteration is the current one
        differing = [one for one in differing if not one.endswith(": curr_iteration")]
    assert differing == []
    assert differences_of_logs(expected, broken, resumed, step) == []
    assert tracked(starter.save) == matrix.ITERATIONS
    assert not list(starter.save.glob(".tft-dump-*"))
