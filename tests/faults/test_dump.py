"""Survivors of a real Megatron job write what Megatron itself would have written with all ranks alive, bit by bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from support.tiny_gpt import tiny_gpt_args

pytest.importorskip("torch")

DRIVER = Path(__file__).resolve().parents[1] / "support" / "dump_job.py"
TIMEOUT_SECONDS = 400
SAVED_STEP = 3
FOLDER = f"iter_{SAVED_STEP:07d}"
COPIES = ("--num-distributed-optimizer-instances", "2")
CHECKOUT_NEEDS = ("six", "regex", "yaml", "einops")

Version = Literal["0.19", "0.12"]
Scenario = dict[str, Any]
Job = Callable[..., dict[str, dict[int, dict[str, Any]]]]


@pytest.fixture(params=["wheel", "checkout"])
def megatron(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Version:
    """The installed megatron-core, and the checkout that MEGATRON_LM_PATH names."""
    if importlib.util.find_spec("einops") is None:
        pytest.skip("einops is not installed; Megatron needs it to build several copies of the optimizer state")
    if request.param == "wheel":
        if importlib.util.find_spec("megatron.training") is None:
            pytest.skip("the installed megatron-core ships no megatron.training; install megatron-core>=0.17")
        return "0.19"
    checkout = os.environ.get("MEGATRON_LM_PATH")
    if not checkout:
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout (core_v0.12.1)")
    missing = [name for name in CHECKOUT_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the checkout in MEGATRON_LM_PATH imports {', '.join(missing)}, not installed here")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (checkout, os.environ.get("PYTHONPATH")))))
    return "0.12"


@pytest.fixture
def job(tmp_path: Path, megatron: Version) -> Job:
    """Runs a job that saves step 3 and then dumps it; returns result[scenario][rank]."""

    def run(
        scenarios: list[Scenario], *, out: Path | None = None, ranks: int = 4, **tiny: Any
    ) -> dict[str, dict[int, dict[str, Any]]]:
        out = out or tmp_path
        out.mkdir(exist_ok=True)
        spec = {"out": str(out), "copies": 2, "ranks": ranks, "scenarios": scenarios, "timeout": TIMEOUT_SECONDS - 20}
        (out / "spec.json").write_text(json.dumps(spec))
        tiny = {"save": str(out / "ref"), "save_interval": SAVED_STEP, "train_iters": 9, **tiny}
        command = [sys.executable, str(DRIVER), str(out / "spec.json")]
        command += tiny_gpt_args(data_prefix=None, megatron=megatron, **tiny)
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (out / "log").open("w") as log:  # not a pipe, which a left-over process would hold open
            status = subprocess.call(
                command, env=environ, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_SECONDS
            )
        assert status == 0, (out / "log").read_text()[-8000:]
        results: dict[str, dict[int, dict[str, Any]]] = {}
        for path in out.glob("result-*.json"):
            _, name, rank = path.stem.split("-")
            results.setdefault(name, {})[int(rank)] = json.loads(path.read_text())
        return results

    return run


def assert_equal(reference: Path, dumped: Path) -> None:
    from support.compare_checkpoints import differences, read

    found = list(differences(read(reference), read(dumped)))
    # core_v0.12.1 leaves empty dicts in common.pt for the parameters of which the rank that writes it holds a part.
    found = [one for one in found if not (one.startswith("/common.pt/optimizer/param_state/") and "only in" in one)]
    assert not found, found[:10]


def dead_in_turn(*, last: int) -> list[Scenario]:
    """Each rank in turn takes no part, with parameters not gathered once; `last` really dies."""
    others = [rank for rank in range(4) if rank != last]
    scenarios: list[Scenario] = [{"name": f"without{rank}", "dead": [rank]} for rank in others]
    scenarios[1]["stale"] = True
    return [*scenarios, {"name": f"without{last}", "dead": [last]}]


TOPOLOGIES = [
    pytest.param({}, id="dp4-bf16"),
    pytest.param({"tp": 2, "dtype": "fp16"}, id="tp2-fp16"),
    pytest.param({"pp": 2, "vpp": 2, "overlap": True}, id="pp2-vpp2-overlap"),
    pytest.param({"pp": 2, "dtype": "fp32"}, id="pp2-fp32"),
    pytest.param({"ep": 2, "num_experts": 4}, id="ep2"),
    pytest.param({"distributed_optimizer": False, "dtype": "fp16"}, id="dp4-fp16-plain"),
    pytest.param({"distributed_optimizer": False, "dtype": "fp32", "tp": 2}, id="tp2-fp32-plain"),
]
# By day every topology in one format, the formats in turn.
PAIRS = [
    pytest.param(
        *topology.values,
        ckpt_format,
        id=f"{topology.id}-{ckpt_format}",
        marks=pytest.mark.nightly if (number + turn) % 2 else (),
    )
    for number, topology in enumerate(TOPOLOGIES)
    for turn, ckpt_format in enumerate(("torch_dist", "torch"))
]


@pytest.mark.parametrize(("topology", "ckpt_format"), PAIRS)
def test_the_dump_equals_the_checkpoint_of_all_ranks(
    job: Job, tmp_path: Path, megatron: Version, topology: dict[str, Any], ckpt_format: str
) -> None:
    if megatron == "0.12" and "ep" in topology:
        pytest.skip("core_v0.12.1 by itself keeps one copy of the experts' optimizer state")
    extra = COPIES if topology.get("distributed_optimizer", True) else ()
    results = job(dead_in_turn(last=0), ckpt_format=ckpt_format, extra=extra, dropout=0.1, **topology)
    for name, ranks in results.items():
        assert len(ranks) == 3
        assert {one.get("path") for one in ranks.values()} == {str(tmp_path / name / FOLDER)}, ranks
        assert_equal(tmp_path / "ref" / FOLDER, tmp_path / name / FOLDER)
        assert (tmp_path / name / "latest_checkpointed_iteration.txt").read_text() == str(SAVED_STEP)
        assert {path.name for path in (tmp_path / name).iterdir()} == {FOLDER, "latest_checkpointed_iteration.txt"}
    assert len(results) == 4


@pytest.mark.parametrize("ckpt_format", [pytest.param("torch", marks=pytest.mark.nightly), "torch_dist"])
def test_two_ranks_may_be_missing_when_they_share_no_shard(job: Job, tmp_path: Path, ckpt_format: str) -> None:
    scenarios = [{"name": "without03", "dead": [0, 3], "stale": True}, {"name": "without02", "dead": [0, 2]}]
    results = job(scenarios, ckpt_format=ckpt_format, extra=COPIES)
    assert_equal(tmp_path / "ref" / FOLDER, tmp_path / "without03" / FOLDER)
    assert all("no healthy rank holds dense shard 0" in one["error"] for one in results["without02"].values())


@pytest.mark.parametrize("ckpt_format", [pytest.param("torch", marks=pytest.mark.nightly), "torch_dist"])
def test_megatron_alone_goes_on_from_the_dump_with_half_the_ranks(job: Job, tmp_path: Path, ckpt_format: str) -> None:
    job([{"name": "dump", "dead": [0]}], ckpt_format=ckpt_format, extra=COPIES, dropout=0.1)
    ends = []
    for name in ("ref", "dump"):
        out = tmp_path / f"from-{name}"
        job([], out=out, load=str(tmp_path / name), ckpt_format=ckpt_format, dropout=0.1, ranks=2)
        ends.append(out / "ref" / "iter_0000006")
    from support.compare_checkpoints import differences, read

    # The arguments name the directory that was loaded.
    assert [one for one in differences(*map(read, ends)) if "args/load" not in one] == []


@pytest.mark.parametrize("ckpt_format", [pytest.param("torch", marks=pytest.mark.nightly), "torch_dist"])
def test_a_rank_killed_while_it_writes_leaves_the_old_checkpoint(job: Job, tmp_path: Path, ckpt_format: str) -> None:
    old = tmp_path / "old" / "iter_0000001"
    old.mkdir(parents=True)
    (old / "data").write_text("old")
    (tmp_path / "old" / "latest_checkpointed_iteration.txt").write_text("1")
    scenario = {"name": "kill", "dead": [0], "save": str(tmp_path / "old"), "fail": {"2": "kill"}, "deadline": 30}
    ranks = job([scenario], ckpt_format=ckpt_format, extra=COPIES)["kill"]
    assert sorted(ranks) == [1, 3]
    assert all("was not written" in one["error"] and one["seconds"] < 35 for one in ranks.values())
    assert (tmp_path / "old" / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert (old / "data").read_text() == "old"
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"iter_0000001", "latest_checkpointed_iteration.txt"}


@pytest.mark.parametrize("ckpt_format", [pytest.param("torch", marks=pytest.mark.nightly), "torch_dist"])
def test_a_failing_disk_leaves_nothing_and_is_told_by_every_rank(job: Job, tmp_path: Path, ckpt_format: str) -> None:
    (tmp_path / "file").touch()
    scenarios = [
        {"name": "nofolder", "dead": [0], "save": str(tmp_path / "file" / "save"), "deadline": 30},
        {"name": "full", "dead": [0], "fail": {"1": "fsize", "2": "fsize", "3": "fsize"}, "deadline": 30},
        {"name": "after", "dead": [0], "save": str(tmp_path / "full")},
        {"name": "twice", "dead": [0], "save": str(tmp_path / "full")},
    ]
    results = job(scenarios, ckpt_format=ckpt_format, extra=COPIES)
    assert all("Not a directory" in one["error"] for one in results["nofolder"].values())
    assert all("was not written" in one["error"] and one["seconds"] < 35 for one in results["full"].values())
    assert_equal(tmp_path / "ref" / FOLDER, tmp_path / "full" / FOLDER)
    # The step is there already: said, not written again.
    assert all(one["path"] == str(tmp_path / "full" / FOLDER) for one in results["twice"].values())
    assert all(one["bytes"] == 0 for one in results["twice"].values())
    assert {path.name for path in (tmp_path / "full").iterdir()} == {FOLDER, "latest_checkpointed_iteration.txt"}
