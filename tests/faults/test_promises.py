"""What must hold when more goes wrong than one rank: nothing that was there is lost, and the reason is said."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.compare import differences_of_logs, differences_of_runs
from support.folders import content, mounted, tracked
from support.jobs import Job

if TYPE_CHECKING:
    from faults.conftest import Starter

pytestmark = pytest.mark.timeout(400)

ITERATIONS = 7
JOB = {"train_iters": ITERATIONS, "eval_interval": 6}
NONE_WRITTEN = "none was written now; older checkpoints are as they were"
DIES = "rank=1,moment=forward,step=6,kind=sigkill"
LATE = "delay=0.5"  # behind the gate: the others have left it as well
night = functools.partial(pytest.param, marks=pytest.mark.nightly)  # what tests in place and of the matrix cover too
PATIENCE_SECONDS = 60.0  # TTP_OT of every job here


@pytest.fixture(scope="module")
def unbroken(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """Jobs without a fault; filled by the tests that need them."""
    return {}


@pytest.fixture
def whole(starter: Starter, unbroken: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Seven steps without a fault."""
    if "whole" not in unbroken:
        unbroken["whole"] = starter.elsewhere(tmp_path_factory.mktemp("whole")).run("job", **JOB)
    assert unbroken["whole"].code == 0, unbroken["whole"].story()
    return unbroken["whole"]


@pytest.fixture
def after_four(starter: Starter, unbroken: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The save directory of a job that was stopped in good order after step 4."""
    if "after_four" not in unbroken:
        place = starter.elsewhere(tmp_path_factory.mktemp("after_four"))
        unbroken["after_four"] = place.run("job", **JOB, extra=["--exit-interval", "4"])
    job = unbroken["after_four"]
    assert job.code == 0 and job.records() == [], job.story()
    return job.folder.parent / "save"


def check_dumped(job: Job, save: Path, step: int, faulty: list[int]) -> None:
    """The job ended with a checkpoint of `step`."""
    assert job.code == 1, job.story()
    record = job.records()[-1]
    assert record["strategy"] == "dump" and record["step"] == step, job.story()
    assert record["ranks"] == faulty, job.story()
    assert record["checkpoint"] == str(save / f"iter_{step:07d}")
    assert job.reported("checkpoint") == f"step {step} in {save / f'iter_{step:07d}'}"
    assert tracked(save) == step
    assert not list(save.glob(".tft-dump-*"))
    assert job.left_over() == []


def check_nothing_touched(job: Job, save: Path, before: dict[str, str], *reason: str) -> None:
    """The job ended in time, without a checkpoint, with a reason; what was there is there, to the byte."""
    assert job.code == 1, job.story()
    record = job.records()[-1]
    assert record["strategy"] == "exit" and record["step"] == 0, job.story()
    for words in reason:
        assert words in record["reason"], job.story()
    assert record["reason"] == job.reported("reason")
    assert job.reported("checkpoint") == NONE_WRITTEN
    assert content(save) == before
    assert record["seconds_in_all"] < PATIENCE_SECONDS
    assert job.left_over() == []


def check_goes_on(starter: Starter, whole: Job, broken: Job, step: int, **named: object) -> None:
    """A restart begins at `step` and ends as if there had been no fault."""
    resumed = starter.run("resumed", **{**JOB, **named})
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(whole, resumed) == []
    start = min((step for moment, step in broken.moments(3) if moment == "step_begin"), default=step)
    assert differences_of_logs(whole, broken, resumed, step, start) == []


# ---------------------------------------------------------------------- several ranks at once


def test_two_ranks_of_different_shards_die_at_once(starter: Starter, whole: Job) -> None:
    broken = starter.run("broken", "rank=0,moment=forward,step=6,kind=sigkill;" + DIES, **JOB)
    check_dumped(broken, starter.save, 5, [0, 1])
    check_goes_on(starter, whole, broken, 5)


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
def test_a_job_that_saves_no_optimizer_state_is_dumped_without_it(starter: Starter, ckpt_format: str) -> None:
    extra = ["--no-save-optim", "--no-save-rng"]
    broken = starter.run("broken", DIES, **JOB, ckpt_format=ckpt_format, extra=extra)
    check_dumped(broken, starter.save, 5, [1])


def test_both_holders_of_a_shard_die_and_what_was_saved_before_stays(
    starter: Starter, whole: Job, after_four: Path
) -> None:
    starter.begin_from(after_four)
    before = content(starter.save)
    inject = ";".join(f"rank={rank},moment=forward,step=6,kind=sigkill" for rank in (0, 2))
    broken = starter.run("broken", inject, **JOB)
    check_nothing_touched(broken, starter.save, before, "no usable copy of the dense optimizer shard of ranks 0, 2")
    check_goes_on(starter, whole, broken, 4)


def test_a_rank_that_leaves_without_a_word_has_died(starter: Starter, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=3,moment=backward,step=6,kind=exit", **JOB)
    check_dumped(broken, starter.save, 5, [3])
    assert "ended with exit code 3" in broken.reported("reason")


def test_an_exception_in_user_code_on_one_rank(starter: Starter, whole: Job, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=2,moment=forward,step=6,kind=exception", **JOB)
    check_dumped(broken, starter.save, 5, [])
    assert "ValueError: injected" in broken.reported("reason")
    assert "Traceback" in broken.output(2, "stderr")
    check_goes_on(starter, whole, broken, 5)


def test_an_exception_inside_the_optimizer_update_makes_a_rank_unusable(starter: Starter, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=2,moment=in_update,step=6,kind=exception", **JOB)
    check_dumped(broken, starter.save, 6, [2])


# ---------------------------------------------------------------------- moments without a step of their own


@pytest.mark.parametrize("start", [0, 4], ids=["of the first start", "of a restart"])
def test_a_fault_before_the_first_step(starter: Starter, after_four: Path, start: int) -> None:
    if start:
        starter.begin_from(after_four)
    else:
        starter.save.mkdir()
    before = content(starter.save)
    broken = starter.run("broken", f"rank=1,moment=between,step={start},kind=sigkill", **JOB)
    check_nothing_touched(broken, starter.save, before, "nothing to save")


def test_a_fault_in_the_evaluation_after_training(starter: Starter, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=1,moment=evaluate,step=7,kind=sigkill", **JOB)
    check_dumped(broken, starter.save, 7, [1])


@pytest.mark.parametrize("moment", ["forward", night("after_gate"), "between"])
def test_a_fault_around_an_iteration_whose_update_is_skipped(
    starter: Starter, unbroken: dict[str, Job], tmp_path_factory: pytest.TempPathFactory, moment: str
) -> None:
    if "fp16" not in unbroken:
        unbroken["fp16"] = starter.elsewhere(tmp_path_factory.mktemp("fp16")).run("job", **JOB, dtype="fp16")
    whole = unbroken["fp16"]
    assert whole.code == 0, whole.story()
    skipped = [step for step, lines in whole.losses().items() if "skipped iterations:   1" in lines[0]]
    assert skipped and skipped[0] < ITERATIONS, "the job is there to skip a step"
    step = skipped[0]
    late = f",{LATE}" if moment == "after_gate" else ""
    at = step + 1 if moment == "forward" else step
    broken = starter.run("broken", f"rank=1,moment={moment},step={at},kind=sigkill{late}", **JOB, dtype="fp16")
    check_dumped(broken, starter.save, step, [1])
    check_goes_on(starter, whole, broken, step, dtype="fp16")


def test_a_fault_while_a_save_is_still_being_written_in_the_background(starter: Starter, whole: Job) -> None:
    named = {**JOB, "save_interval": 4, "extra": ["--async-save"]}
    broken = starter.run("broken", "rank=1,moment=forward,step=5,kind=sigkill", **named)
    check_dumped(broken, starter.save, 4, [1])
    check_goes_on(starter, whole, broken, 4)


# ---------------------------------------------------------------------- the dump itself fails


def test_a_disk_that_is_full_for_all(starter: Starter, after_four: Path) -> None:
    size = sum(path.stat().st_size for path in after_four.rglob("*") if path.is_file())
    with mounted(starter.save, "-t", "tmpfs", "-o", f"size={int(size * 1.5)}", "tmpfs") as small:
        if not small:
            pytest.skip("mounting a small file system needs privileges")
        for entry in after_four.iterdir():
            os.system(f"cp -r {entry} {starter.save}")
        before = content(starter.save)
        broken = starter.run("broken", DIES, **JOB)
        check_nothing_touched(broken, starter.save, before, "was not written", "MiB are free in")


def test_a_disk_that_is_full_for_one_rank_does_not_keep_the_others_from_saving(
    starter: Starter, after_four: Path
) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", DIES + ";rank=0,moment=dump,step=5,kind=disk_full", **JOB)
    check_dumped(broken, starter.save, 5, [1])


def test_a_folder_that_becomes_read_only_while_training(starter: Starter, after_four: Path) -> None:
    starter.begin_from(after_four)
    before = content(starter.save)
    source = starter.folder / "source"
    starter.save.rename(source)
    with mounted(starter.save, "--bind", str(source)) as bound:
        if not bound:
            pytest.skip("a mount needs privileges")
        broken = hold_in_step_six(starter)
        subprocess.run(["mount", "-o", "remount,bind,ro", str(starter.save)], check=True)
        os.kill(broken.rank_pids()[1], signal.SIGKILL)
        broken.wait()
        check_nothing_touched(broken, starter.save, before, "Read-only file system")


def test_a_folder_that_cannot_be_written_is_refused_before_training(starter: Starter) -> None:
    starter.save.parent.mkdir(parents=True, exist_ok=True)
    starter.save.write_text("a file, not a folder")
    refused = starter.run("broken", **JOB)
    assert refused.code == 1, refused.story()
    assert "--save" in refused.launcher_output and "cannot be written" in refused.launcher_output, refused.story()
    assert refused.moments(0) == []
    assert starter.save.read_text() == "a file, not a folder"


@pytest.mark.parametrize(
    ("victim", "covered"), [(0, True), (2, True), (3, False)], ids=["leader", "other", "last copy"]
)
def test_a_rank_dies_in_the_middle_of_writing_the_dump(
    starter: Starter, whole: Job, after_four: Path, victim: int, covered: bool
) -> None:
    starter.begin_from(after_four)
    before = content(starter.save)
    broken = starter.run("broken", f"{DIES};rank={victim},moment=dump,step=5,kind=sigkill", **JOB)
    if covered:
        check_dumped(broken, starter.save, 5, sorted([1, victim]))
        check_goes_on(starter, whole, broken, 5)
    else:
        words = "no usable copy of the dense optimizer shard of ranks 1, 3"
        check_nothing_touched(broken, starter.save, before, words)


# ---------------------------------------------------------------------- SIGTERM


def hold_in_step_six(starter: Starter, **named: bool) -> Job:
    """A job whose rank 2 takes its time in step 6, when all have completed step 5."""
    job = starter.start("broken", "rank=2,moment=forward,step=6,kind=slow,seconds=4", **JOB, **named)
    for rank in range(4):
        job.wait_for("step_begin", 5, rank)
    return job


def test_sigterm_to_one_rank_saves(starter: Starter, whole: Job, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=1,moment=backward,step=6,kind=sigterm", **JOB)
    # The signal is taken in while the step goes on: whichever was the last to be completed.
    step = max(broken.completed(rank) for rank in range(4))
    check_dumped(broken, starter.save, step, [])
    assert "terminated" in broken.reported("reason")
    if step < ITERATIONS:
        check_goes_on(starter, whole, broken, step)


@pytest.mark.parametrize("targets", [night("ranks"), night("launcher"), "launcher and ranks"])
def test_sigterm_to_many_saves(starter: Starter, whole: Job, after_four: Path, targets: str) -> None:
    starter.begin_from(after_four)
    broken = hold_in_step_six(starter)
    pids = [broken.pid] if "launcher" in targets else []
    pids += broken.rank_pids().values() if "ranks" in targets else []
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    broken.wait()
    check_dumped(broken, starter.save, 5, [])
    check_goes_on(starter, whole, broken, 5)


# ---------------------------------------------------------------------- hangs

HANG = {"TFT_HANG_SECONDS": "5"}


@pytest.mark.parametrize(
    ("where", "step"),
    [
        night("moment=forward,step=6", 5, id="forward"),
        night(f"moment=in_update,step=6,{LATE}", 6, id="update"),
        night("moment=evaluate,step=6", 6, id="evaluation"),
        pytest.param("moment=save_begin,step=6", 6, id="save"),
    ],
)
def test_a_stopped_process_is_found_and_the_others_save(
    starter: Starter, after_four: Path, where: str, step: int
) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", f"rank=2,kind=sigstop,{where}", environ=HANG, **JOB, save_interval=6)
    check_dumped(broken, starter.save, step, [2])
    (fault,) = [fault for fault in broken.records()[0]["fault"] if fault["rank"] == 2]
    assert fault["kind"] == "hang"


def test_a_data_loader_that_blocks_is_found(starter: Starter, whole: Job, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=1,moment=loader,step=6,kind=block", environ=HANG, **JOB)
    check_dumped(broken, starter.save, 5, [1])
    assert {fault["kind"] for fault in broken.records()[0]["fault"] if fault["rank"] == 1} == {"hang"}
    check_goes_on(starter, whole, broken, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["evaluate", "save_begin"])
def test_a_long_evaluation_or_save_is_no_hang(starter: Starter, after_four: Path, moment: str) -> None:
    starter.begin_from(after_four)
    inject = f"rank=2,moment={moment},step=6,kind=slow,seconds=12"
    job = starter.run("job", inject, environ=HANG, **JOB, save_interval=6)
    assert job.code == 0, job.story()
    assert job.records() == []


# ---------------------------------------------------------------------- the real launcher, new interpreters


def test_the_real_launcher_loses_rank_0_and_the_restart_goes_on(starter: Starter, whole: Job, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = starter.run("broken", "rank=0,moment=backward,step=6,kind=sigkill", really=True, **JOB)
    check_dumped(broken, starter.save, 5, [0])
    resumed = starter.run("resumed", really=True, **JOB)
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(whole, resumed) == []
    assert differences_of_logs(whole, broken, resumed, 5, start=4) == []


def test_the_real_launcher_is_told_to_end(starter: Starter, after_four: Path) -> None:
    starter.begin_from(after_four)
    broken = hold_in_step_six(starter, really=True)
    os.kill(broken.pid, signal.SIGTERM)
    began = time.monotonic()
    broken.wait()
    assert time.monotonic() - began < PATIENCE_SECONDS
    check_dumped(broken, starter.save, 5, [])
    assert "the launcher received SIGTERM" in broken.launcher_output


def test_the_launcher_restarts_all_ranks_after_the_dump(starter: Starter, whole: Job, after_four: Path) -> None:
    starter.begin_from(after_four)
    # The fault of the first attempt must not happen again: it is for a step that the second does not compute.
    options = ("--standalone", "--max-restarts", "1")
    job = starter.run("job", f"rank=3,moment=after_update,step=5,kind=sigkill,{LATE}", options=options, blanks=8, **JOB)
    assert job.code == 0, job.story()
    assert differences_of_runs(whole, job) == []
    assert tracked(starter.save) == ITERATIONS
