"""The Megatron-LM of 2023 (commit 285068c): the same faults, and a run that ends as if there had been none.

MEGATRON_LEGACY_PATH names a checkout. Everything runs on CPU, with stand-ins for Apex.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.compare import differences_in_place, differences_of_logs, differences_of_runs
from support.folders import tracked
from support.jobs import RANKS, Job
from support.legacy_data import documents, write_dataset, write_tokenizer
from support.legacy_gpt import legacy_gpt_args
from support.legacy_inject import RAISE
from support.legacy_jobs import TREE, LegacySpec, run
from support.legacy_seed import edited_copy

ITERATIONS = 17
IN_PLACE = ("--enable-hbmfault-repair", "--enable-worker-reboot")
# As MindSpeed-LLM's own tests raise them.
UCE = ";".join(f"{rank}:10:{'UCE ERROR' if rank == 1 else 'FORCE STOP'}" for rank in range(RANKS))
OTHER = "2:15:Other ERROR"
DIES = "rank=2,step=13,moment=forward,kind=sigkill"

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not os.environ.get(TREE), reason=f"{TREE} names no Megatron-LM checkout of 2023 (commit 285068c)"
    ),
    pytest.mark.skipif(importlib.util.find_spec("pybind11") is None, reason="its dataset helpers need pybind11"),
]


class Legacy:
    """Starts jobs.

    Args:
        data: folder with dataset and tokenizer.
        folder: for the files of the jobs.
    """

    def __init__(self, data: Path, folder: Path) -> None:
        self._data = data
        self._folder = folder
        self._unbroken: dict[str, Job] = {}

    def run(
        self,
        name: str,
        inject: str = "",
        *,
        flags: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        save: Path | None = None,
        plugin: bool = True,
        **gpt: Any,
    ) -> Job:
        """Run a job; by default it has a folder `save` of its own."""
        folder = self._folder / name
        arguments = legacy_gpt_args(self._data, save=save or folder / "save", **{"train_iters": ITERATIONS, **gpt})
        return run(LegacySpec(folder, [*arguments, *flags], inject, plugin, environ or {}))

    def unbroken(self, **gpt: Any) -> Job:
        """A run without a fault, made once for the same arguments."""
        key = str(sorted(gpt.items()))
        if key not in self._unbroken:
            self._unbroken[key] = self.run(f"unbroken-{len(self._unbroken)}", **gpt)
        job = self._unbroken[key]
        assert job.code == 0, job.story()
        return job


@pytest.fixture(scope="module")
def legacy(tmp_path_factory: pytest.TempPathFactory) -> Legacy:
    """Jobs of this module."""
    data = tmp_path_factory.mktemp("legacy-data")
    write_dataset(data / "text", documents())
    write_tokenizer(data)
    return Legacy(data, tmp_path_factory.mktemp("legacy"))


def recoveries(job: Job) -> list[tuple[str, list[int], int, int]]:
    """Strategy, restarted ranks, step and recomputed steps of each."""
    return [(one["strategy"], one["restarted"], one["step"], one["recomputed_steps"]) for one in job.records()]


def check_resumes(legacy: Legacy, unbroken: Job, broken: Job, step: int, name: str, **gpt: Any) -> None:
    """The job ended with a checkpoint of `step`, and a restart goes on as if nothing had happened."""
    save = broken.folder / "save"
    assert broken.code == 1, broken.story()
    assert tracked(save) == step, broken.story()
    assert not list(save.glob(".tft-*"))
    resumed = legacy.run(name, save=save, **gpt)
    assert resumed.code == 0, resumed.story()
    assert differences_of_runs(unbroken, resumed) == []
    assert differences_of_logs(unbroken, broken, resumed, step) == []


def files_of(checkpoint: Path) -> set[str]:
    """Files of a checkpoint, but for ours."""
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*.pt")}


def test_two_faults_are_repaired_in_place_and_the_third_leaves_a_checkpoint(legacy: Legacy) -> None:
    broken = legacy.run("all", DIES, flags=IN_PLACE, environ={RAISE: f"{UCE};{OTHER}"})
    expected = [("retry", [], 9, 0), ("respawn", [2], 12, 0), ("dump", [], 14, 0)]
    assert recoveries(broken) == expected, broken.story()
    # Two shards, because the optimizer has two copies among four ranks: a checkpoint of a stock job of two.
    files = {"mp_rank_00/model_rng.pt", "mp_rank_00_000/optim.pt", "mp_rank_00_001/optim.pt"}
    assert files_of(broken.folder / "save" / "iter_0000014") == files
    assert broken.left_over() == []
    check_resumes(legacy, legacy.unbroken(), broken, 14, "all-resumed")


@pytest.mark.nightly
def test_a_job_goes_on_after_a_memory_error_and_a_killed_process(legacy: Legacy) -> None:
    unbroken = legacy.unbroken()
    job = legacy.run("in-place", DIES, flags=IN_PLACE, environ={RAISE: UCE})
    assert job.code == 0, job.story()
    assert recoveries(job) == [("retry", [], 9, 0), ("respawn", [2], 12, 0)], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()
    assert job.left_over() == []


@pytest.mark.nightly
def test_a_job_without_flags_for_recovery_in_place_saves_its_last_step(legacy: Legacy) -> None:
    broken = legacy.run("dump", DIES)
    assert recoveries(broken) == [("dump", [], 12, 0)], broken.story()
    check_resumes(legacy, legacy.unbroken(), broken, 12, "dump-resumed")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "gpt",
    [
        {"tp": 2},
        {"pp": 2},
        {"dtype": "fp16"},
        {"dtype": "fp32"},
        {"distributed_optimizer": False},
        {"dtype": "fp32", "distributed_optimizer": False},
    ],
    ids=lambda gpt: "-".join(f"{key}={value}" for key, value in gpt.items()),
)
def test_a_killed_process_in_every_kind_of_job(legacy: Legacy, gpt: dict[str, Any]) -> None:
    unbroken = legacy.unbroken(**gpt)
    name = "-".join(f"{key}{value}" for key, value in gpt.items())
    job = legacy.run(f"respawn-{name}", DIES, flags=IN_PLACE, environ={RAISE: UCE}, **gpt)
    assert job.code == 0, job.story()
    assert [one[:2] for one in recoveries(job)] == [("retry", []), ("respawn", [2])], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()

    broken = legacy.run(f"dump-{name}", DIES, **gpt)
    check_resumes(legacy, unbroken, broken, 12, f"resumed-{name}", **gpt)


MOMENTS = ("backward", "before_gate", "barrier", "after_gate", "after_update", "gather", "between")


@pytest.mark.nightly
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_at_any_moment_costs_no_completed_step(legacy: Legacy, moment: str) -> None:
    unbroken = legacy.unbroken()
    dies = f"rank=3,step=6,moment={moment},kind=sigkill"
    job = legacy.run(f"killed-{moment}", dies, flags=IN_PLACE)
    assert job.code == 0, job.story()
    assert [(one[0], one[3]) for one in recoveries(job)] == [("respawn", 0)], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["parameters", "main_parameters", "moments", "gradients", "activations"])
def test_overwritten_memory_is_repaired_from_the_copy(legacy: Legacy, kind: str) -> None:
    unbroken = legacy.unbroken()
    job = legacy.run(f"memory-{kind}", f"rank=1,step=6,moment=backward,kind=memory_{kind}", flags=IN_PLACE)
    assert job.code == 0, job.story()
    assert [one[0] for one in recoveries(job)] == ["retry"], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()


@pytest.mark.nightly
def test_a_network_error_is_repaired_in_place(legacy: Legacy) -> None:
    unbroken = legacy.unbroken()
    job = legacy.run("network", flags=IN_PLACE, environ={RAISE: "0:6:SUSPECT REMOTE ERROR"})
    assert job.code == 0, job.story()
    assert recoveries(job) == [("retry", [], 5, 0)], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()


@pytest.mark.nightly
def test_an_optimizer_of_torch_in_place_of_apexs_is_repaired_and_saved_too(legacy: Legacy) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parents[1] / "support" / "legacy_torch_adam")}
    unbroken = legacy.run("torch-adam", environ=environ)
    assert unbroken.code == 0, unbroken.story()
    job = legacy.run("torch-adam-in-place", DIES, flags=IN_PLACE, environ={**environ, RAISE: UCE})
    assert [one[0] for one in recoveries(job)] == ["retry", "respawn"], job.story()
    assert differences_in_place(unbroken, job) == [], job.story()
    broken = legacy.run("torch-adam-broken", DIES, environ=environ)
    check_resumes(legacy, unbroken, broken, 12, "torch-adam-resumed", environ=environ)


@pytest.mark.nightly
def test_copies_change_neither_losses_nor_gradient_norms(legacy: Legacy) -> None:
    # Sums are made in another order; a norm over the world would be larger by the square root of two.
    stock = legacy.run("stock", plugin=False, train_iters=6)
    assert stock.code == 0, stock.story()
    assert numbers(stock) == pytest.approx(numbers(legacy.unbroken(train_iters=6)), rel=5e-3)


def numbers(job: Job) -> list[float]:
    """Loss and gradient norm of each iteration."""
    found = []
    for _, (line,) in sorted(job.losses().items()):
        for name in ("lm loss: ", "grad norm: "):
            found.append(float(line.partition(name)[2].partition(" ")[0]))
    return found


@pytest.mark.nightly
def test_a_checkpoint_of_another_size_is_refused_and_left_alone(legacy: Legacy) -> None:
    stock = legacy.run("stock-saved", plugin=False, train_iters=3)
    assert stock.code == 0, stock.story()
    refused = legacy.run("refused", save=stock.folder / "save")
    assert refused.code == 1
    assert "has 4 optimizer shards" in refused.reported("reason"), refused.story()


@pytest.mark.nightly
def test_a_tree_edited_by_hand_as_the_first_guide_says_saves_its_last_step(legacy: Legacy, tmp_path: Path) -> None:
    tree = edited_copy(Path(os.environ[TREE]), tmp_path / "tree")
    environ = {TREE: str(tree), "TFT_TEST_BY_HAND": "1", "HIGH_AVAILABILITY": "dump"}
    unbroken = legacy.run("seed-unbroken", plugin=False, environ=environ)
    assert unbroken.code == 0, unbroken.story()
    # Nothing in it knows of moments, so the process is ended from outside.
    broken = legacy.run("seed-broken", plugin=False, environ={**environ, "TFT_TEST_KILL": "2:13"})
    check_resumes(legacy, unbroken, broken, 12, "seed-resumed", plugin=False, environ=environ)
