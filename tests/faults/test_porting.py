"""A trainer with handlers of its own (tests/support/tiny_trainer, the example of docs/porting.md) survives the faults.

`make test` runs a sample; TFT_MATRIX=all every kind at every moment.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.compare import differences_in_place, differences_of_runs
from support.folders import tracked
from support.in_place_matrix import ITERATIONS, RANKS, SAVED, Packed
from support.jobs import Job
from support.tiny_trainer import matrix
from support.tiny_trainer.jobs import IN_PLACE, TinyJobs

if TYPE_CHECKING:
    from support.jobs import ForkServer

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"),
]

SAVE_FOLDERS = {f"iter_{step:07d}" for step in SAVED}


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, servers: Callable[[Any], ForkServer]) -> Callable[[str], Job]:
    """A run of the protected trainer without a fault, for each topology."""
    done: dict[str, Job] = {}

    def run(topology: str) -> Job:
        if topology not in done:
            jobs = TinyJobs(tmp_path_factory.mktemp("tiny"), lambda: servers("0.19"))
            done[topology] = jobs.run("unbroken", topology=topology)
            assert done[topology].code == 0, done[topology].story()
        return done[topology]

    return run


@pytest.fixture
def jobs(tmp_path: Path, servers: Callable[[Any], ForkServer]) -> Iterator[TinyJobs]:
    """Starts jobs; those that run on when the test ends are killed."""
    made = TinyJobs(tmp_path, lambda: servers("0.19"))
    yield made
    for job in made.started:
        if job.poll() is None:
            job.kill()


# ---------------------------------------------------------------- the matrix


def check_survived(packed: Packed, jobs: TinyJobs, expected: Job) -> None:
    """A job with several faults ends as if nothing had happened."""
    options = ("--standalone", *(["--standby"] if packed.standby else []))
    job = jobs.run("job", packed.schedule, topology=packed.job[0], environ=packed.environ, options=options)
    assert job.code == 0, job.story()
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
    assert [{key: record[key] for key in wanted[0]} for record in job.records()] == wanted, job.story()
    assert differences_in_place(expected, job) == [], job.story()
    assert [len(job.processes(rank)) for rank in range(RANKS)] == [1 + packed.lost(rank) for rank in range(RANKS)]
    assert job.left_over() == []
    assert {path.name for path in jobs.save.iterdir() if path.is_dir()} == SAVE_FOLDERS
    assert tracked(jobs.save) == ITERATIONS


def test_the_tiny_trainer_shrugs_off_one_fault_after_the_other(jobs: TinyJobs, unbroken: Callable[[str], Job]) -> None:
    check_survived(matrix.SAMPLE, jobs, unbroken("dp4"))


@pytest.mark.nightly
@pytest.mark.parametrize("packed", matrix.LASTING, ids=[packed.name for packed in matrix.LASTING])
def test_the_tiny_trainer_shrugs_off(packed: Packed, jobs: TinyJobs, unbroken: Callable[[str], Job]) -> None:
    check_survived(packed, jobs, unbroken(packed.job[0]))


@pytest.mark.nightly
@pytest.mark.parametrize("packed", matrix.ENDING, ids=[packed.name for packed in matrix.ENDING])
def test_an_exception_leads_to_a_checkpoint(packed: Packed, jobs: TinyJobs, unbroken: Callable[[str], Job]) -> None:
    ((case, at),) = packed.cases
    topology = packed.job[0]
    step = case.target(at)
    check_saved(jobs, packed.schedule, IN_PLACE, step=step, expected=unbroken(topology), topology=topology)


def check_saved(
    jobs: TinyJobs, inject: str, arguments: tuple[str, ...], *, step: int, expected: Job, topology: str = "dp4"
) -> None:
    """A job that cannot go on saves `step`, and another goes on from there to the same end."""
    broken = jobs.run("broken", inject, arguments, topology=topology)
    assert broken.code == 1, broken.story()
    (record,) = broken.records()
    assert (record["strategy"], record["step"]) == ("dump", step), broken.story()
    assert tracked(jobs.save) == step
    assert not list(jobs.save.glob(".tft-dump-*"))
    assert broken.left_over() == []
    resumed = jobs.run("resumed", "", arguments, topology=topology)
    assert resumed.code == 0, resumed.story()
    differing = differences_of_runs(expected, resumed)
    if step == ITERATIONS:  # nothing was left to be trained, so that nobody has set the learning rate
        differing = [one for one in differing if not one.endswith("optimizer/groups")]
    assert differing == [], resumed.story()
    lines = {**broken.losses(), **resumed.losses()}
    # The line of the last step is lost when the fault came between its update and its log.
    wanted = {number: line for number, line in expected.losses().items() if number != step or number in lines}
    assert lines == wanted


def test_without_recovery_in_place_the_survivors_of_a_lost_rank_save_the_step(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    fault = "rank=1,step=7,moment=after_gate,kind=sigkill,delay=0.5"
    check_saved(jobs, fault, (), step=7, expected=unbroken("dp4"))


# ---------------------------------------------------------------- the contract


def test_the_tiny_trainer_keeps_the_contract_and_trains_on_after_its_rehearsal(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    job = jobs.run("job", script="rehearse.py")
    assert job.code == 0, job.story()
    for rank in range(RANKS):
        assert f"rank {rank}: the handlers keep the contract" in job.output(rank)
    assert differences_of_runs(unbroken("dp4"), job) == []


@pytest.mark.nightly
def test_a_rehearsal_that_fails_ends_the_job_and_is_not_begun_again(jobs: TinyJobs) -> None:
    job = jobs.run("job", "rank=1,step=3,moment=forward,kind=exception", script="rehearse.py")
    assert job.code == 1, job.story()
    assert [record["strategy"] for record in job.records()] == ["dump"], job.story()
    assert [len(job.processes(rank)) for rank in range(RANKS)] == [1] * RANKS


# ---------------------------------------------------------------- the rest of the points


@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["dp4", "tp2dp2"])
def test_protection_changes_no_bit_of_training(topology: str, jobs: TinyJobs, unbroken: Callable[[str], Job]) -> None:
    plain = jobs.run("plain", "", (), script="plain.py", plugin=False, topology=topology)
    assert plain.code == 0, plain.story()
    jobs.begin_anew()
    without = jobs.run("without", "", (), plugin=False, topology=topology)
    assert without.code == 0, without.story()
    for job in (plain, without):
        assert job.losses() == unbroken(topology).losses()
        # The shards are cut otherwise; what is made of them is the same.
        differing = differences_of_runs(unbroken(topology), job)
        assert not [one for one in differing if not one.partition(": ")[2].startswith("optimizer/")]
    assert not (without.folder / "logs").exists(), "without its flags nothing is started"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("faults", "strategy", "ranks"),
    [
        # The fault of another rank in each phase of a recovery.
        ("rank=1,step=4,moment=forward,kind=sigkill;rank=2,step=3,moment=clean,kind=sigkill", "respawn", [1, 2]),
        ("rank=1,step=4,moment=forward,kind=sigkill;rank=0,step=3,moment=rebuild,kind=sigkill", "respawn", [0, 1]),
        ("rank=1,step=4,moment=forward,kind=sigkill;rank=2,step=3,moment=repair,kind=sigkill", "respawn", [1, 2]),
        ("rank=1,step=4,moment=forward,kind=sigkill;rank=0,step=3,moment=rollback,kind=sigkill", "respawn", [0, 1]),
        # Two ranks at once, of different shards.
        ("rank=0,step=4,moment=forward,kind=sigkill;rank=3,step=4,moment=forward,kind=sigkill", "respawn", [0, 3]),
    ],
)
def test_faults_that_come_together_are_one_recovery(
    faults: str, strategy: str, ranks: list[int], jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    job = jobs.run("job", faults)
    assert job.code == 0, job.story()
    (record,) = job.records()
    assert (record["strategy"], record["ranks"]) == (strategy, ranks), job.story()
    assert differences_in_place(unbroken("dp4"), job) == [], job.story()


@pytest.mark.nightly
def test_when_both_holders_of_a_shard_are_lost_all_go_back_to_the_last_checkpoint(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    holders = ";".join(f"rank={rank},step=8,moment=forward,kind=sigkill" for rank in (1, 3))
    job = jobs.run("job", holders)
    assert job.code == 0, job.story()
    (record,) = job.records()
    assert (record["strategy"], record["step"], record["recomputed_steps"]) == ("reload", 5, 2), job.story()
    assert differences_in_place(unbroken("dp4"), job, again=(6, 7)) == [], job.story()


@pytest.mark.nightly
def test_a_full_disk_on_one_rank_fails_the_dump_and_its_partner_writes_in_its_place(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    faults = "rank=2,step=7,moment=forward,kind=exception;rank=1,step=6,moment=dump,kind=disk_full"
    broken = jobs.run("broken", faults, ())
    assert broken.code == 1, broken.story()
    (record,) = broken.records()
    assert (record["strategy"], record["step"], record["attempts"]) == ("dump", 6, 2), broken.story()
    assert tracked(jobs.save) == 6
    resumed = jobs.run("resumed", "", ())
    assert differences_of_runs(unbroken("dp4"), resumed) == []


@pytest.mark.nightly
def test_a_stand_by_of_the_real_launcher_takes_the_place_of_a_lost_rank(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    fault = "rank=1,step=6,moment=backward,kind=sigkill"
    job = jobs.run("real", fault, options=("--standalone", "--standby"), launcher="ttprun")
    assert job.code == 0, job.story()
    assert [record["strategy"] for record in job.records()] == ["respawn"]
    assert differences_in_place(unbroken("dp4"), job) == [], job.story()


@pytest.mark.nightly
def test_a_job_that_is_held_between_two_steps_goes_on_as_if_nothing_had_happened(
    jobs: TinyJobs, unbroken: Callable[[str], Job]
) -> None:
    job = jobs.run("held", "", (), script="pausing.py", launcher="torchrun")
    assert job.code == 0, job.story()
    assert "obeyed True, held True, stayed True" in job.output(0), job.story()
    assert "continued True" in job.output(0)
    assert differences_of_runs(unbroken("dp4"), job) == []
