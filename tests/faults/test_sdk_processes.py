"""Real processes under ttprun, protected by `mindio_ttp` alone, on plain torch and gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import sdk_gloo_job
from support.launching import Launched, free_port, launch

SCRIPT = sdk_gloo_job.__file__
IN_PLACE = ("--enable-high-availability", "--enable-worker-reboot", "--enable-hbmfault-repair")


def start(tmp_path: Path, *arguments: str, launcher: str = "ttprun", ranks: int = 2) -> Launched:
    save = tmp_path / "save"
    save.mkdir()
    environ = {
        "TTP_PORT": str(free_port()),
        "TTP_LOG_PATH": str(tmp_path / "logs"),
        "TTP_OT": "30",
        "TFT_HEARTBEAT_SECONDS": "0.2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(SCRIPT).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = ["--nproc-per-node", str(ranks), "--master-port", str(free_port()), SCRIPT]
    return launch(launcher, [*command, "--save", str(save), *arguments], tmp_path / "out", environ)


def expected(step: int, ranks: int = 2) -> str:
    return sdk_gloo_job.reference(ranks, step).digest()


def test_a_job_survives_what_its_callbacks_repair_and_saves_what_they_cannot(tmp_path: Path) -> None:
    faults = ("--fault", "kill:1:20", "--fault", "uce:1:25", "--fault", "error:0:30")
    job = start(tmp_path, *IN_PLACE, "--steps", "100000", *faults)
    try:
        code = job.wait(120)
        said = job.output
        assert "rank 1: has come back" in said
        assert said.count("rebuild without [1]") == 2
        assert "rank 1: repair 3 from [0] to [1]" in said and "rank 1: repair 1 from [0] to [1]" in said
        assert said.count("rollback to 19") == said.count("rollback to 24") == 2
        assert "rank 1: clean for retry, memory error: True" in said
        for step in (1, 19, 20, 24, 25, 29):
            assert f"rank 0: step {step} {expected(step)}" in said
            assert f"rank 1: step {step} {expected(step)}" in said
        assert code == 1, said
        assert f"checkpoint: step 29 in {tmp_path / 'save/step_29'}" in said
        (saved,) = (tmp_path / "save/step_29").iterdir()
        state = torch.load(saved)
        reference = sdk_gloo_job.reference(2, 29)
        assert torch.equal(state["weights"], reference.weights)
        assert torch.equal(state["momentum"], reference.momentum)
        assert not job.leftovers()
    finally:
        job.kill()


@pytest.mark.nightly
def test_without_the_switch_for_new_processes_a_lost_rank_leads_to_the_checkpoint(tmp_path: Path) -> None:
    switches = [one for one in IN_PLACE if one != "--enable-worker-reboot"]
    faults = ("--fault", "uce:1:15", "--fault", "kill:1:20")
    job = start(tmp_path, *switches, "--steps", "100000", *faults)
    try:
        code = job.wait(120)
        said = job.output
        assert code == 1, said
        assert said.count("rollback to 14") == 2, said
        assert f"checkpoint: step 19 in {tmp_path / 'save/step_19'}" in said
        assert "has come back" not in said
        state = torch.load(tmp_path / "save/step_19/rank_0.pt")
        assert torch.equal(state["weights"], sdk_gloo_job.reference(2, 19).weights)
        assert not job.leftovers()
    finally:
        job.kill()


@pytest.mark.nightly
def test_under_torchrun_rank_0_has_the_controller_and_a_lost_rank_leads_to_the_checkpoint(tmp_path: Path) -> None:
    job = start(tmp_path, *IN_PLACE, "--steps", "100000", "--fault", "kill:1:20", launcher="torchrun")
    try:
        job.wait(120)
        said = job.output
        assert "rank 0: saves [{'type': 0, 'ranks': [0]}] on mindio-tft-save" in said
        state = torch.load(tmp_path / "save/step_19/rank_0.pt")
        assert torch.equal(state["weights"], sdk_gloo_job.reference(2, 19).weights)
    finally:
        job.kill()


@pytest.mark.nightly
def test_a_job_without_faults_ends_by_itself(tmp_path: Path) -> None:
    job = start(tmp_path, *IN_PLACE, "--steps", "5", ranks=3)
    try:
        assert job.wait(120) == 0
        # The order of a sum of three is gloo's own.
        digests = {line.rpartition(" ")[2] for line in job.output.splitlines() if "done after 5" in line}
        assert len(digests) == 1
        assert job.output.count("done after 5") == 3
    finally:
        job.kill()
