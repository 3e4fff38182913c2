"""MindSpeed-LLM 2.3.0 on CPU: its own pretrain_gpt.py, its own flags, and the faults of its own tests.

Its tests/pipeline/high_availability breaks the step with number 10 (counted from 0) by "UCE ERROR" on rank 1 and "FORCE
STOP" on the others, and the one with number 15 by "Other ERROR".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.compare import differences_in_place, differences_of_logs, differences_of_runs
from support.folders import tracked
from support.jobs import RANKS, Job, JobSpec
from support.npu_on_cpu import job as mindspeed
from support.npu_on_cpu.faults import RAISE

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        bool(mindspeed.missing()),
        reason=f"{', '.join(mindspeed.missing())} must name checkouts of MindSpeed-LLM 2.3.0, MindSpeed "
        "v2.3.0_core_r0.12.1 and Megatron-LM core_v0.12.1",
    ),
]

WAIT_SECONDS = 280.0
REPAIRING = ("--enable-hbmfault-repair", "--enable-worker-reboot")
MEMORY_FAULT = "10:1:UCE ERROR"
OTHER_FAULT = "15:1:Other ERROR"
DEATH = "15:2:SIGKILL"

# MindSpeed-LLM's own repair sends no random states; a rank whose model was made anew has drawn from its generators.
NOT_SENT = "rng/"

Run = Callable[..., Job]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs jobs of pretrain_gpt.py that load from and save to `save`, one after the other."""
    started: list[Job] = []

    def begin(
        name: str,
        *,
        tp: int = 2,
        flags: Sequence[str] = (),
        inject: str = "",
        raises: str = "",
        plugin: bool = True,
        mode: str = "plugin",
        save: Path | None = None,
    ) -> Job:
        place = save or tmp_path / "save"
        arguments = mindspeed.arguments(tp=tp, save=place, load=place, extra=flags)
        made = mindspeed.start(JobSpec(tmp_path / name, arguments, inject, plugin, {RAISE: raises}), mode)
        started.append(made)
        made.wait(WAIT_SECONDS)
        return made

    yield begin
    for one in started:
        if one.poll() is None:
            one.kill()


def steps(job: Job) -> list[int]:
    """Iterations of the training log."""
    return sorted(job.losses())


def differing_but_for_random_states(unbroken: Job, mended: Job, rank: int) -> list[str]:
    """What the runs do not have in common, random states of the repaired rank left out."""
    return [one for one in differences_in_place(unbroken, mended) if not one.startswith(f"rank {rank}: {NOT_SENT}")]


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [2, 1], ids=["tp2dp2", "dp4"])
def test_it_trains_without_high_availability(run: Run, tp: int) -> None:
    job = run("plain", tp=tp, plugin=False)
    assert job.code == 0, job.story()
    assert steps(job) == list(range(1, mindspeed.ITERATIONS + 1))
    assert job.records() == [] and set(job.states()) == set(range(RANKS))


@pytest.mark.parametrize("tp", [2, pytest.param(1, marks=pytest.mark.nightly)], ids=["tp2dp2", "dp4"])
def test_a_memory_fault_and_the_loss_of_a_process_leave_no_trace(run: Run, tp: int, tmp_path: Path) -> None:
    unbroken = run("unbroken", tp=tp, flags=REPAIRING, save=tmp_path / "elsewhere")
    assert unbroken.code == 0, unbroken.story()
    killed = "rank=2,step=15,moment=forward,kind=sigkill"
    mended = run("mended", tp=tp, flags=REPAIRING, raises=MEMORY_FAULT, inject=killed)
    assert mended.code == 0, mended.story()
    found = [(one["strategy"], one["step"], one["restarted"]) for one in mended.records()]
    assert found == [("retry", 10, []), ("respawn", 14, [2])], mended.story()
    assert differences_in_place(unbroken, mended) == [], mended.story()
    assert mended.left_over() == []


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["plugin", "sdk"])
@pytest.mark.parametrize("fault", [OTHER_FAULT, DEATH], ids=["exception", "death"])
def test_without_a_flag_that_repairs_a_fault_leads_to_a_checkpoint_from_which_a_restart_goes_on(
    run: Run, tmp_path: Path, mode: str, fault: str
) -> None:
    unbroken = run("unbroken", mode=mode, save=tmp_path / "elsewhere")
    assert unbroken.code == 0, unbroken.story()
    broken = run("broken", mode=mode, raises=fault)
    assert broken.code == 1, broken.story()
    assert [(one["strategy"], one["step"]) for one in broken.records()] == [("dump", 15)], broken.story()
    assert tracked(tmp_path / "save") == 15
    resumed = run("resumed", mode=mode)
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(unbroken, resumed) == []
    assert differences_of_logs(unbroken, broken, resumed, 15) == []


@pytest.mark.nightly
def test_its_own_feature_repairs_a_memory_fault_as_a_client_of_the_sdks_names(run: Run, tmp_path: Path) -> None:
    flags = ("--enable-hbmfault-repair",)
    unbroken = run("unbroken", flags=flags, mode="sdk", save=tmp_path / "elsewhere")
    assert unbroken.code == 0, unbroken.story()
    mended = run("mended", flags=flags, mode="sdk", raises=MEMORY_FAULT)
    assert mended.code == 0, mended.story()
    assert [(one["strategy"], one["step"]) for one in mended.records()] == [("retry", 10)], mended.story()
    assert differing_but_for_random_states(unbroken, mended, rank=1) == [], mended.story()


@pytest.mark.nightly
def test_its_own_feature_takes_a_new_process_for_a_lost_one(run: Run, tmp_path: Path) -> None:
    unbroken = run("unbroken", flags=REPAIRING, mode="sdk", save=tmp_path / "elsewhere")
    assert unbroken.code == 0, unbroken.story()
    mended = run("mended", flags=REPAIRING, mode="sdk", raises=DEATH)
    assert mended.code == 0, mended.story()
    found = [(one["strategy"], one["step"], one["restarted"]) for one in mended.records()]
    assert found == [("respawn", 15, [2])], mended.story()
    assert differing_but_for_random_states(unbroken, mended, rank=2) == [], mended.story()
