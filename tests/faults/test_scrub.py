"""Silent corruption: one bit of one copy of a shard changes, and nobody is told."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from support.compare import differences_of_logs, differences_of_runs
from support.jobs import Job

if TYPE_CHECKING:
    from faults.conftest import Starter

pytestmark = pytest.mark.timeout(300)

FLIP = "rank=1,step=5,moment=after_update,kind=bit_flip"
ITERATIONS = 8


def scrubbing(action: str) -> dict[str, str]:
    return {"TFT_SCRUB_INTERVAL": "2", "TFT_SCRUB_ACTION": action}


def corruption_lines(job: Job) -> list[str]:
    """What the ranks have said about copies that differ."""
    lines = [
        json.loads(line)["message"]
        for path in sorted((job.folder / "logs").glob("ttp_log.jsonl*"))
        for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line.startswith("silent corruption:")]


def test_the_last_step_on_which_the_copies_agreed_is_saved_and_training_goes_on_from_it(starter: Starter) -> None:
    unbroken = starter.elsewhere(starter.folder / "u").run("unbroken", train_iters=ITERATIONS)
    assert unbroken.code == 0, unbroken.story()

    broken = starter.run("broken", FLIP, environ=scrubbing("dump"), train_iters=ITERATIONS)
    assert broken.code == 1, broken.story()
    (record,) = broken.records()
    assert (record["strategy"], record["step"]) == ("dump", 4), broken.story()
    assert {fault["rank"] for fault in record["fault"]} == {1, 3}
    assert "dense shard of ranks (1, 3) differ at step 6" in record["reason"]
    assert (starter.save / "latest_checkpointed_iteration.txt").read_text().strip() == "4"

    resumed = starter.run("resumed", environ=scrubbing("dump"), train_iters=ITERATIONS)
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(unbroken, resumed) == []
    assert differences_of_logs(unbroken, broken, resumed, 4) == []
    assert corruption_lines(resumed) == []


def test_a_warning_names_ranks_shard_and_step_and_training_goes_on(starter: Starter) -> None:
    job = starter.run("warned", FLIP, environ=scrubbing("warn"), train_iters=ITERATIONS)
    assert job.code == 0, job.story()
    assert job.records() == []
    lines = corruption_lines(job)
    assert lines and all("dense shard of ranks (1, 3) differ at step 6" in line for line in lines[:2])


def test_the_job_can_be_stopped_without_a_checkpoint(starter: Starter) -> None:
    job = starter.run("stopped", FLIP, environ=scrubbing("stop"), train_iters=ITERATIONS)
    assert job.code == 1, job.story()
    (record,) = job.records()
    assert record["strategy"] == "exit" and "differ at step 6" in record["reason"], job.story()
    assert not (starter.save / "latest_checkpointed_iteration.txt").exists()
