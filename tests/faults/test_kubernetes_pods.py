"""The command of the pods in launch/kubernetes, with their variables, in two network namespaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import manifests, two_nodes
from support.compare import differences_in_place, differences_of_runs
from support.jobs import JobSpec
from support.pods import PodJob, pod_network
from support.tiny_gpt import tiny_gpt_args
from support.two_nodes import Nodes

_WHY_NOT = two_nodes.why_not()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(500),
    pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT or "-"),
]
WAIT_SECONDS = 240.0
FLAGS = ("--enable-hbmfault-repair", "--enable-worker-reboot")
GPT: dict[str, Any] = {"train_iters": 12, "save_interval": 5}
# Slow enough for somebody to act between two steps.
SLOWLY = "rank=1,step=-1,moment=forward,kind=slow,seconds=0.3,times=1000"

Start = Callable[..., PodJob]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with two_nodes.two_nodes() as made, pod_network(made):
        yield made


@pytest.fixture(scope="module")
def start(nodes: Nodes, text: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts the two pods of a manifest."""
    jobs: list[PodJob] = []

    def begin(manifest: str, inject: str = SLOWLY, **environ: str) -> PodJob:
        folder: Path = tmp_path_factory.mktemp("pods")
        save = str(folder / "save")
        arguments = [*tiny_gpt_args(data_prefix=text, save=save, load=save, **GPT), *FLAGS]
        environ = {"TFT_INJECT_STATE": str(folder / "fired"), **environ}
        jobs.append(PodJob(JobSpec(folder, arguments, inject, environ=environ), nodes, manifest))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.poll() is None:
            job.kill()


def _allowed(manifest: str) -> list[range]:
    """Ports that the NetworkPolicy of a manifest opens."""
    documents = manifests.render(manifests.MANIFESTS / manifest)
    (policy,) = (document for document in documents if document["kind"] == "NetworkPolicy")
    (rule,) = policy["spec"]["ingress"]
    return [range(port["port"], port.get("endPort", port["port"]) + 1) for port in rule["ports"]]


@pytest.fixture(scope="module")
def expected(start: Start) -> PodJob:
    """A run without a fault, which listens only where the NetworkPolicy lets the other pod in."""
    job = start("pytorchjob")
    job.wait_for("committed", 4)
    listening = job.ports_listening()
    assert {23456, 8000} < listening
    assert not [port for port in listening if not any(port in ports for ports in _allowed("pytorchjob"))]
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    return job


def test_a_pod_whose_container_is_started_again_comes_back_into_the_job(start: Start, expected: PodJob) -> None:
    job = start("volcano")
    job.wait_for("committed", 4)
    survivors = {rank: job.rank_pids()[rank] for rank in (0, 1)}
    job.kill_pod(1)
    job.start_pod(1)
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    (record,) = job.records()
    assert (record["strategy"], record["ranks"]) == ("respawn", [2, 3]), job.story()
    assert {rank: job.rank_pids()[rank] for rank in (0, 1)} == survivors
    assert differences_in_place(expected, job, lines_may_repeat=True) == [], job.story()


def test_a_pod_that_is_deleted_has_the_job_saved_and_all_resume_from_there(start: Start, expected: PodJob) -> None:
    job = start("pytorchjob")
    job.wait_for("committed", 7)
    job.delete_pod(1)
    assert job.wait(WAIT_SECONDS) == 1, job.story()
    saved = job.reported("checkpoint")
    assert saved.startswith("step ") and int(saved.split()[1]) >= 7, job.story()
    for node in (0, 1):
        job.start_pod(node)
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    assert differences_of_runs(expected, job) == [], job.story()


def test_after_the_loss_of_the_first_pod_all_resume_from_the_last_checkpoint(start: Start, expected: PodJob) -> None:
    job = start("pytorchjob", TTP_OT="15")
    job.wait_for("committed", 7)
    job.kill_pod(0)
    job.start_pod(0)
    assert job.wait_for_pod(1, WAIT_SECONDS) == 1, job.story()
    job.start_pod(1)
    assert job.wait(WAIT_SECONDS) == 0, job.story()
    assert differences_of_runs(expected, job) == [], job.story()
