"""One rank is killed, in every job and at every moment: the last completed step is saved, and training goes on from it
as if nothing had happened.

`TFT_MATRIX=all` runs every combination; otherwise a sample, see support.matrix.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support import matrix
from support.compare import differences_of_logs, differences_of_runs
from support.jobs import Job
from support.matrix import Case

if TYPE_CHECKING:
    from faults.conftest import Starter, UnbrokenRuns

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]

CASES = matrix.selected()
# An older Megatron gets every third of them, so that a run with both stays affordable.
PAIRS = [(case, "0.19") for case in CASES]
PAIRS += [(case, "0.12") for case in CASES[::3] if matrix.trains(*case.job, "0.12")]


@pytest.mark.parametrize(
    ("case", "megatron"), PAIRS, ids=[f"{case.name}-{version}" for case, version in PAIRS], indirect=["megatron"]
)
def test_a_killed_rank_costs_no_completed_step(
    case: Case, megatron: str, starter: Starter, unbroken_runs: UnbrokenRuns
) -> None:
    expected = unbroken_runs.of(starter, **case.arguments(megatron))

    broken = starter.run("broken", case.moment.schedule(case.rank), **case.arguments(megatron))
    check_promise(broken, starter.save, case)

    resumed = starter.run("resumed", **case.arguments(megatron))
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(expected, resumed) == []
    assert differences_of_logs(expected, broken, resumed, case.moment.step) == []


def check_promise(job: Job, save: Path, case: Case) -> None:
    """The job has ended with a checkpoint of the right step, and says so everywhere."""
    rank, step, story = case.rank, case.moment.step, job.story()
    assert job.code == 1, story
    (record,) = job.records()
    assert record["ranks"] == [rank], story
    assert {"rank": rank, "kind": "process_death", "detail": "was killed by SIGKILL"} in record["fault"]
    assert record["step"] == step, story
    completed = [job.completed(one) for one in range(matrix.RANKS) if one != rank]
    assert step >= max(completed), f"a survivor had completed step {max(completed)}\n{story}"
    assert record["reason"] == job.reported("reason")
    assert not list(save.glob(".tft-dump-*"))
    assert case.moment.name.startswith("save") or not list(save.glob(".tft-aside-*"))
    assert job.left_over() == []
    tracker = save / "latest_checkpointed_iteration.txt"
    if step == 0:
        assert record["strategy"] == "exit" and "nothing to save" in record["reason"], story
        assert not tracker.exists()
        return
    path = save / f"iter_{step:07d}"
    assert record["strategy"] == "dump" and record["checkpoint"] == str(path), story
    assert job.reported("checkpoint") == f"step {step} in {path}"
    assert tracker.read_text().strip() == str(step)
