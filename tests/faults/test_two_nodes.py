"""Two nodes with addresses of their own: a rank is killed, a node is killed and started again, the link is cut."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import two_nodes
from support.compare import differences_in_place
from support.jobs import JobSpec, free_port
from support.tiny_gpt import tiny_gpt_args
from support.two_nodes import Nodes, TwoNodeJob

pytestmark = pytest.mark.timeout(500)

_WHY_NOT = two_nodes.why_not()
needs_namespaces = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-")
WAIT_SECONDS = 240.0
FLAGS = ("--enable-hbmfault-repair", "--enable-worker-reboot")
GPT: dict[str, Any] = {"train_iters": 14, "eval_interval": 5, "save_interval": 9}
# Slow enough for somebody to act between two steps.
SLOWLY = "rank=1,step=-1,moment=forward,kind=slow,seconds=0.3,times=1000"

Start = Callable[..., TwoNodeJob]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes.two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def start(nodes: Nodes, text: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts jobs on both nodes."""
    jobs: list[TwoNodeJob] = []

    def begin(inject: str = SLOWLY, **environ: str) -> TwoNodeJob:
        folder = tmp_path_factory.mktemp("job")
        save = str(folder / "save")
        arguments = [*tiny_gpt_args(data_prefix=text, save=save, load=save, **GPT), *FLAGS]
        environ = {"TFT_INJECT_STATE": str(folder / "fired"), **environ}
        jobs.append(TwoNodeJob(JobSpec(folder, arguments, inject, environ=environ), nodes, free_port()))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.kill()


@pytest.fixture(scope="module")
def expected(start: Start) -> TwoNodeJob:
    """A run without a fault."""
    job = start("")
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    return job


@needs_namespaces
@pytest.mark.nightly
def test_a_rank_of_the_other_node_is_started_anew_there(start: Start, expected: TwoNodeJob) -> None:
    job = start()
    job.wait_for("committed", 4)
    os.kill(job.rank_pids()[3], signal.SIGKILL)
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    (record,) = job.records()
    assert (record["strategy"], record["ranks"], record["restarted"]) == ("respawn", [3], [3]), job.story()
    assert differences_in_place(expected, job) == [], job.story()


@needs_namespaces
def test_a_node_that_is_started_again_joins_the_job_that_has_waited_for_it(start: Start, expected: TwoNodeJob) -> None:
    job = start()
    job.wait_for("committed", 4)
    survivors = {rank: job.rank_pids()[rank] for rank in (0, 1)}
    job.kill_node()
    time.sleep(1.0)
    job.start_node()
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    (record,) = job.records()
    assert (record["strategy"], record["ranks"]) == ("respawn", [2, 3]), job.story()
    assert {rank: job.rank_pids()[rank] for rank in (0, 1)} == survivors
    assert differences_in_place(expected, job, lines_may_repeat=True) == [], job.story()


@needs_namespaces
@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [1.0, 8.0])
def test_a_link_that_is_cut_and_mended_costs_no_process(
    start: Start, expected: TwoNodeJob, nodes: Nodes, seconds: float
) -> None:
    job = start()
    job.wait_for("committed", 4)
    before = job.rank_pids()
    nodes.cut()
    time.sleep(seconds)
    nodes.mend()
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    assert job.rank_pids() == before
    assert all(record["strategy"] == "retry" for record in job.records()), job.story()
    assert differences_in_place(expected, job) == [], job.story()
