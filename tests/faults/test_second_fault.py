"""More goes wrong than one thing: several ranks, faults inside a recovery, no copy left, no recovery left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from support.compare import differences_in_place, differences_of_logs, differences_of_runs
from support.folders import tracked
from support.in_place_matrix import FLAGS
from support.jobs import RANKS, Job

if TYPE_CHECKING:
    from faults.conftest import Starter, UnbrokenRuns

pytestmark = pytest.mark.timeout(600)

# Shards of four data-parallel ranks: ranks 0 and 2 hold one, ranks 1 and 3 the other.
JOB: dict[str, Any] = {"train_iters": 14, "extra": FLAGS}
WAIT_SECONDS = 300.0
DIES = "kind=sigkill"
PHASES = ("stop", "clean", "rebuild", "repair", "rollback", "resume")


def dies(rank: int, step: int, more: str = "") -> str:
    """An entry of a schedule: the rank is killed in the forward pass of the step."""
    return f"rank={rank},step={step},moment=forward,{DIES}{more}"


def check(job: Job, unbroken: Job, *strategies: str) -> list[dict[str, Any]]:
    """The job has lived and is equal to the unbroken one; its records."""
    assert job.code == 0, job.story()
    records = job.records()
    assert [record["strategy"] for record in records] == list(strategies), job.story()
    assert differences_in_place(unbroken, job) == [], job.story()
    assert job.left_over() == []
    return records


def processes(job: Job) -> list[int]:
    """How many processes each rank has had."""
    return [len(job.processes(rank)) for rank in range(RANKS)]


@pytest.fixture
def run(starter: Starter) -> Callable[..., Job]:
    """Runs a job to its end."""

    def run(inject: str, **named: Any) -> Job:
        job = starter.start("job", inject, **{**JOB, "blanks": 20, **named})
        job.wait(WAIT_SECONDS)
        return job

    return run


@pytest.fixture
def unbroken(starter: Starter, unbroken_runs: UnbrokenRuns) -> Job:
    """The same without a fault."""
    return unbroken_runs.of(starter, **JOB)


# ---------------------------------------------------------------------- several ranks


def test_two_ranks_of_different_shards_at_once(run: Callable[..., Job], unbroken: Job) -> None:
    job = run(f"{dies(0, 4)};{dies(1, 4)}")
    (record,) = check(job, unbroken, "respawn")
    assert record["ranks"] == record["restarted"] == [0, 1] and record["step"] == 3
    assert processes(job) == [2, 2, 1, 1]


@pytest.mark.nightly
def test_a_memory_fault_while_another_rank_dies(run: Callable[..., Job], unbroken: Job) -> None:
    job = run(f"{dies(0, 4)};rank=1,step=4,moment=backward,kind=memory_parameters")
    (record,) = check(job, unbroken, "respawn")
    assert record["ranks"] == [0, 1] and record["restarted"] == [0]
    assert processes(job) == [2, 1, 1, 1]


def test_a_rank_dies_while_another_one_comes_back(starter: Starter, unbroken: Job) -> None:
    slow = "rank=1,step=-1,moment=setup,kind=slow,seconds=4,returned=1"
    job = starter.start("job", f"{dies(1, 4)};{slow}", blanks=20, **JOB)
    deadline = time.monotonic() + WAIT_SECONDS
    while len(job.processes(1)) < 2:
        assert job.poll() is None and time.monotonic() < deadline, job.story()
        time.sleep(0.02)
    os.kill(job.rank_pids()[2], signal.SIGKILL)
    job.wait(WAIT_SECONDS)
    (record,) = check(job, unbroken, "respawn")
    assert record["restarted"] == [1, 2] and record["step"] == 3
    assert processes(job) == [1, 2, 2, 1]


def test_without_a_folder_of_what_has_happened_a_replacement_is_not_killed_by_the_same_entry(
    run: Callable[..., Job], unbroken: Job
) -> None:
    job = run(dies(1, 4), environ={"TFT_INJECT_STATE": ""})
    check(job, unbroken, "respawn")
    assert processes(job) == [1, 2, 1, 1]


# ---------------------------------------------------------------------- in the phases of a recovery


def test_a_rank_that_came_back_dies_again_in_each_phase_in_which_it_takes_part(
    run: Callable[..., Job], unbroken: Job
) -> None:
    again = {0: "setup", 1: "rebuild", 2: "repair", 3: "rollback"}
    parts = []
    for rank, moment in again.items():
        parts += [dies(rank, 3 + 2 * rank), f"rank={rank},step=-1,moment={moment},{DIES},returned=1"]
    parts += [dies(0, 11), f"rank=0,step=10,moment=resume,{DIES},returned=1"]
    job = run(";".join(parts))
    records = check(job, unbroken, *["respawn"] * 5)
    assert [record["restarted"] for record in records] == [[0], [1], [2], [3], [0]]
    assert [record["step"] for record in records] == [2, 4, 6, 8, 10]
    assert processes(job) == [5, 3, 3, 3]


def test_a_survivor_dies_in_each_phase(run: Callable[..., Job], unbroken: Job) -> None:
    """Never both holders of a shard."""
    parts = []
    for number, phase in enumerate(PHASES):
        step = 3 + 2 * number
        first, second = (number % RANKS, (number + 1) % RANKS)
        parts += [dies(first, step), f"rank={second},step={step - 1},moment={phase},{DIES}"]
    job = run(";".join(parts))
    records = check(job, unbroken, *["respawn"] * len(PHASES))
    assert [len(record["restarted"]) for record in records] == [2] * len(PHASES)
    assert [record["step"] for record in records] == [2, 4, 6, 8, 10, 12]


@pytest.mark.nightly
def test_a_rank_dies_in_each_phase_of_the_repair_of_a_memory_fault(run: Callable[..., Job], unbroken: Job) -> None:
    parts = []
    for number, phase in enumerate(PHASES):
        step = 3 + 2 * number
        first, second = (number % RANKS, (number + 1) % RANKS)
        parts.append(f"rank={first},step={step},moment=backward,kind=memory_main_parameters")
        parts.append(f"rank={second},step={step - 1},moment={phase},{DIES}")
    job = run(";".join(parts))
    records = check(job, unbroken, *["respawn"] * len(PHASES))
    assert [record["restarted"] for record in records] == [[1], [2], [3], [0], [1], [2]]
    assert processes(job) == [2, 3, 3, 2]


@pytest.mark.parametrize("kind", ["exception", pytest.param("memory_parameters", marks=pytest.mark.nightly)])
def test_a_phase_that_fails_is_tried_in_another_way(run: Callable[..., Job], unbroken: Job, kind: str) -> None:
    """A rank on which a phase of a retry has failed is started anew, or all of them try once more."""
    failing = f"rank=2,step=3,moment=repair,kind={kind}"
    job = run(f"rank=1,step=4,moment=backward,kind=memory_moments;{failing}")
    (record,) = check(job, unbroken, "respawn")
    assert record["step"] == 3


# ---------------------------------------------------------------------- no copy left


SAVING = {"save_interval": 4, "eval_interval": 5}


def both_holders(step: int) -> str:
    """An entry for each holder of a shard."""
    return f"{dies(0, step)};{dies(2, step)}"


def check_reloaded(job: Job, unbroken: Job, saved: int, completed: int, restarted: list[int]) -> None:
    """All ranks went back to a checkpoint, and computed again what came after it."""
    assert job.code == 0, job.story()
    (record,) = job.records()
    assert record["strategy"] == "reload" and record["step"] == saved, job.story()
    assert record["recomputed_steps"] == completed - saved
    assert record["restarted"] == restarted
    again = range(saved + 1, completed + 1)
    expected, found = unbroken.validations(), job.validations()
    repeated = [line for line in expected if any(f"iteration {step} " in line for step in again)]
    assert sorted(found) == sorted(expected + repeated)
    differing = differences_in_place(unbroken, job, again)
    assert [one for one in differing if not one.startswith("evaluations")] == [], job.story()
    assert job.left_over() == []


def test_both_holders_of_a_shard_at_once_send_all_back_to_the_last_checkpoint(
    starter: Starter, run: Callable[..., Job], unbroken_runs: UnbrokenRuns
) -> None:
    gpt = {**JOB, **SAVING}
    job = run(both_holders(7), **gpt)
    check_reloaded(job, unbroken_runs.of(starter, **gpt), 4, 6, [0, 2])
    assert processes(job) == [2, 1, 2, 1]
    assert tracked(starter.save) == 14


@pytest.mark.nightly
def test_the_partner_dies_in_the_middle_of_the_repair(
    starter: Starter, run: Callable[..., Job], unbroken_runs: UnbrokenRuns
) -> None:
    """The one with the memory fault has been half refilled, and nobody is left to refill it."""
    gpt = {**JOB, **SAVING}
    fault = "rank=1,step=7,moment=backward,kind=memory_moments"
    job = run(f"{fault};rank=3,step=6,moment=repair,{DIES}", **gpt)
    check_reloaded(job, unbroken_runs.of(starter, **gpt), 4, 6, [3])


@pytest.mark.nightly
def test_without_a_checkpoint_it_is_the_end_and_the_reason_is_said(starter: Starter, run: Callable[..., Job]) -> None:
    job = run(both_holders(4))
    assert job.code == 1, job.story()
    record = job.records()[-1]
    assert record["strategy"] == "exit" and record["step"] == 0, job.story()
    assert "no usable copy of the dense optimizer shard of ranks 0, 2" in record["reason"]
    assert "there is no checkpoint" in record["reason"]
    assert record["reason"] == job.reported("reason")
    assert tracked(starter.save) == 0 and job.left_over() == []


@pytest.mark.parametrize("kind", ["sigkill", pytest.param("memory_main_parameters", marks=pytest.mark.nightly)])
def test_a_job_without_copies_goes_back_to_the_last_checkpoint(
    starter: Starter, run: Callable[..., Job], unbroken_runs: UnbrokenRuns, kind: str
) -> None:
    gpt = {**JOB, **SAVING, "extra": [*FLAGS, "--distributed-optimizer-no-replica"]}
    job = run(f"rank=1,step=7,moment=forward,kind={kind}", **gpt)
    check_reloaded(job, unbroken_runs.of(starter, **gpt), 4, 6, [1] if kind == "sigkill" else [])


@pytest.mark.nightly
def test_a_network_fault_needs_no_copies(
    starter: Starter, run: Callable[..., Job], unbroken_runs: UnbrokenRuns
) -> None:
    gpt = {**JOB, **SAVING, "extra": [*FLAGS, "--distributed-optimizer-no-replica"]}
    job = run("rank=1,step=7,moment=forward,kind=broken_sockets", **gpt)
    (record,) = check(job, unbroken_runs.of(starter, **gpt), "retry")
    assert record["step"] == 6 and record["ranks"] == []


# ---------------------------------------------------------------------- no recovery left


@pytest.mark.parametrize("budget", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_budget_that_is_used_up_ends_in_a_checkpoint(
    starter: Starter, run: Callable[..., Job], unbroken: Job, budget: int
) -> None:
    faults = [dies(1, 4), dies(2, 6)][-budget - 1 :]
    job = run(";".join(faults), environ={"TFT_RESTART_BUDGET": str(budget)})
    assert job.code == 1, job.story()
    records = job.records()
    assert [record["strategy"] for record in records] == [*["respawn"] * budget, "dump"], job.story()
    assert [record["budget_left"] for record in records] == [0] * (budget + 1)
    assert f"the job has used up its {budget} recoveries in place" in records[-1]["reason"]
    assert tracked(starter.save) == records[-1]["step"] == 5

    resumed = starter.run("resumed", **JOB)
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(unbroken, resumed) == []
    assert differences_of_logs(unbroken, job, resumed, 5) == []


@pytest.mark.nightly
def test_a_rank_that_no_restart_helps_costs_no_completed_step(run: Callable[..., Job], starter: Starter) -> None:
    """There is an older checkpoint, but the copies are worth more."""
    job = run(dies(1, 7, ",times=5"), **SAVING)
    records = job.records()
    assert [record["strategy"] for record in records] == ["respawn", "respawn", "dump"], job.story()
    assert records[-1]["step"] == tracked(starter.save) == 6 and records[-1]["recomputed_steps"] == 0
    assert "no reload: copies of all shards are left" in records[-1]["reason"]


@pytest.mark.nightly
def test_a_fault_that_comes_back_at_the_same_step_is_not_computed_again_for_ever(
    starter: Starter, run: Callable[..., Job], unbroken: Job
) -> None:
    """The third time a retry is passed over, and the rank gets a new process."""
    job = run("rank=1,step=4,moment=forward,kind=memory_activations,times=3")
    records = check(job, unbroken, "retry", "retry", "respawn")
    assert [record["step"] for record in records] == [3, 3, 3]
    assert processes(job) == [1, 2, 1, 1]
