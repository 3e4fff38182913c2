"""MindCluster's TaskD drives the recoveries of a live job: its Python, unmodified, against our controller.

Needs MIND_CLUSTER_PATH, a checkout of Ascend/mind-cluster. The cluster behind TaskD is tests/support/cluster.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.final_state import differences
from support.launching import TOY_JOB
from support.tiny_gpt import tiny_gpt_args

CHECKOUT = os.environ.get("MIND_CLUSTER_PATH", "")
pytestmark = pytest.mark.skipif(not CHECKOUT, reason="MIND_CLUSTER_PATH names no checkout of Ascend/mind-cluster")

FLAGS = ("--enable-high-availability", "--enable-hbmfault-repair", "--enable-worker-reboot")
Start = Callable[..., Cluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the toy job in a cluster; ends it."""
    started: list[Cluster] = []

    def start_toy(*arguments: str, steps: int = 60, **options: object) -> Cluster:
        save = ["--save", str(tmp_path / "save")]
        (tmp_path / "save").mkdir()
        job = [sys.executable, TOY_JOB, "--plugin", "--steps", str(steps), *save, *FLAGS, *arguments]
        cluster = Cluster(Path(CHECKOUT), tmp_path, job, **options)  # type: ignore[arg-type]
        started.append(cluster)
        cluster.start()
        return cluster

    yield start_toy
    for cluster in started:
        cluster.close()


def steps(cluster: Cluster, rank: int) -> list[int]:
    """Steps that a rank has completed, over all its processes."""
    lines = cluster.output(rank).splitlines()
    return [int(line.split()[3]) for line in lines if line.startswith(f"rank {rank} step ")]


def trains(cluster: Cluster) -> None:
    """Wait until the job is in the middle of training, and TaskD takes orders."""
    cluster.until(lambda: cluster.said("listening") and steps(cluster, 0)[-1:] > [5])


def results(cluster: Cluster) -> list[tuple[int, str]]:
    return [(one["code"], one["strategy"]) for one in cluster.said("recover_status")]


def finishes(cluster: Cluster, last: int = 60) -> None:
    cluster.until(cluster.ended)
    assert cluster.codes() == [0, 0], cluster.story()
    assert all(steps(cluster, rank)[-1] == last for rank in (0, 1))


@pytest.mark.parametrize("face", ["manager", "recover"])
def test_taskd_has_a_memory_error_retried(start: Start, face: str) -> None:
    cluster = start("--die", "1:10:memory", face=face)
    finishes(cluster)
    assert cluster.ordered == ["stop_train", "on_global_rank", "retry"]
    assert [one["fault_ranks"] for one in cluster.said("process_fault")] == [{"1": 0}]
    assert [one["code"] for one in cluster.said("stop_complete")] == [0]
    assert [one["strategy_list"] for one in cluster.said("recover_strategy")] == [["retry", "recover", "dump", "exit"]]
    assert results(cluster) == [(0, "retry")]
    assert cluster.starts == {0: 1, 1: 1}


@pytest.mark.parametrize("encrypted", [True, False])
def test_taskd_has_a_killed_process_replaced(start: Start, encrypted: bool) -> None:
    cluster = start("--die", "1:10:SIGKILL", encrypted=encrypted)
    finishes(cluster)
    assert cluster.ordered == ["stop_train", "on_global_rank", "recover"]
    assert results(cluster) == [(0, "recover")]
    assert cluster.starts == {0: 1, 1: 2}
    taskd = (cluster.folder / "taskd.txt").read_text()
    assert ("NOT ENCRYPTED" in taskd) is not encrypted


def test_taskd_has_a_process_that_raised_replaced(start: Start) -> None:
    cluster = start("--die", "0:10:raise")
    finishes(cluster)
    assert [one["fault_ranks"] for one in cluster.said("process_fault")] == [{"0": 1}]
    assert results(cluster) == [(0, "recover")]
    assert cluster.starts == {0: 2, 1: 1}


def test_a_retry_that_fails_is_followed_by_new_processes(start: Start) -> None:
    cluster = start("--die", "1:10:memory", "--broken", "1:rebuild", configured=("retry", "dump"))
    cluster.until(cluster.ended)
    assert cluster.ordered == ["stop_train", "on_global_rank", "retry", "on_global_rank", "dump"]
    assert results(cluster) == [(405, "retry"), (0, "dump")]
    assert cluster.codes()[0] == 75
    assert [path.name for path in (cluster.folder / "save").glob("iter_*")] != []


def test_taskd_has_a_checkpoint_written(start: Start) -> None:
    cluster = start("--die", "1:10:SIGKILL", configured=("dump",))
    cluster.until(cluster.ended)
    assert results(cluster) == [(0, "dump")]
    assert cluster.codes() == [75, -9]
    kept = steps(cluster, 0)[-1]
    assert (cluster.folder / "save" / f"iter_{kept:07d}" / "rank_0").exists()


def test_taskd_ends_the_job(start: Start) -> None:
    cluster = start("--die", "1:10:SIGKILL", configured=())
    cluster.until(cluster.ended)
    assert cluster.ordered[-1] == "exit"
    assert results(cluster) == [(0, "exit")]
    assert cluster.codes() == [75, -9]
    assert list((cluster.folder / "save").glob("iter_*")) == []


def test_taskd_stops_a_job_for_a_fault_that_only_the_cluster_sees(start: Start) -> None:
    cluster = start()
    trains(cluster)
    cluster.fault({1: 1})  # a device is about to fail; the process trains on
    finishes(cluster)
    assert results(cluster) == [(0, "recover")]
    assert cluster.starts == {0: 1, 1: 2}


def test_taskd_saves_and_ends_the_job(start: Start) -> None:
    cluster = start()
    trains(cluster)
    cluster.order("save_and_exit")
    cluster.until(cluster.ended)
    assert cluster.codes() == [75, 75]
    assert results(cluster) == [(0, "dump")]
    assert list((cluster.folder / "save").glob("iter_*"))


@pytest.mark.parametrize("face", ["manager", "recover"])
def test_taskd_pauses_training_and_lets_it_go_on(start: Start, face: str) -> None:
    cluster = start(face=face, steps=240)
    trains(cluster)
    cluster.order("pause_train", timeout=60)
    cluster.until(lambda: cluster.said("stop_complete"))
    held = [steps(cluster, rank)[-1] for rank in (0, 1)]
    assert held[0] == held[1] and cluster.said("stop_complete")[0]["code"] == 0
    cluster.order("change_strategy", strategy="continue")
    finishes(cluster, 240)
    assert results(cluster) == [(0, "continue")]


def test_a_controller_that_taskd_starts_again_serves_the_same_job(start: Start) -> None:
    cluster = start("--die", "1:60:memory", steps=160)
    trains(cluster)
    # Ranks notice after a few seconds; what rank 1 reports before that reaches nobody, and is said again.
    cluster.order("restart_controller")
    finishes(cluster, 160)
    assert results(cluster) == [(0, "retry")]


# A job of real Megatron, with the plugin's own adaptor.

TROUBLE = "rank=1,step=6,moment=backward,kind=memory_moments; rank=0,step=10,moment=forward,kind=sigkill"


def train_megatron(folder: Path, inject: str, *, pause: bool) -> Cluster:
    folder.mkdir()
    script = Path(__file__).parents[1] / "support" / "armed_pretrain.py"
    arguments = tiny_gpt_args(data_prefix=None, train_iters=14, save=str(folder / "save"), dropout=0.1)
    variables = {
        "TFT_INJECT": inject,
        "TFT_INJECT_STATE": str(folder / "fired"),
        "TFT_TEST_FOLDER": str(folder / "trace"),
        "TFT_DEVICE": "cpu",
    }
    cluster = Cluster(Path(CHECKOUT), folder, [sys.executable, str(script), *arguments, *FLAGS], **variables)
    try:
        cluster.start()
        if pause:
            cluster.until(lambda: completed(folder, 0) >= 2, 120)
            cluster.order("pause_train", timeout=60)
            cluster.until(lambda: cluster.said("stop_complete"))
            assert completed(folder, 0) == completed(folder, 1)
            cluster.order("change_strategy", strategy="continue")
        cluster.until(cluster.ended, 200)
        assert cluster.codes() == [0, 0], cluster.story()
        return cluster
    finally:
        cluster.close()


def completed(folder: Path, rank: int) -> int:
    """Last step that a rank has completed."""
    path = folder / "trace" / f"moments-{rank}.txt"
    words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return max((int(word[1]) for word in words if len(word) == 2 and word[0] == "committed"), default=0)


@pytest.mark.nightly
def test_megatron_is_paused_repaired_and_restarted_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    train_megatron(tmp_path / "quiet", "", pause=False)
    cluster = train_megatron(tmp_path / "troubled", TROUBLE, pause=True)
    assert results(cluster) == [(0, "continue"), (0, "retry"), (0, "recover")]
    assert cluster.starts == {0: 2, 1: 1}
    for rank in (0, 1):
        quiet, troubled = (
            json.loads((tmp_path / name / "trace" / f"state-{rank}.json").read_text()) for name in ("quiet", "troubled")
        )
        assert differences(quiet, troubled) == []
