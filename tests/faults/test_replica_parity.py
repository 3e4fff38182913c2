"""With the replica layout a job computes what it computes without: loss, gradient norm and zero count, step by step.

By day a sample of the topologies, at night (TFT_MATRIX=all) all of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from support.tiny_gpt import tiny_gpt_args

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4
STEPS = 4
TIMEOUT_SECONDS = 280
DIGITS = 1e-6  # relative: equal to six digits, that is to reduction order

Version = Literal["0.19", "0.12"]


@dataclass(frozen=True)
class Case:
    """A topology.

    partners: the replica set of rank 0. per_param: bytes of a parameter by the formula, None with several buffers.
    first, later: relative tolerance of the first step, where the parameters are bit-equal, and of later steps. In fp16
        the last bit of the norm, which depends on the order of the sum, flips roundings of parameters, and that grows
        from step to step. Where gradients are summed in 16 bits, the order shows in the fourth digit at once.
    """

    name: str
    arguments: dict[str, Any]
    partners: dict[str, list[int]]
    per_param: float | None
    extra: tuple[str, ...] = ()
    sample: bool = False
    first: float = DIGITS
    later: float = DIGITS


HALVES = {"dense": [0, 2]}
EXPERTS = {"dense": [0, 2], "expert": [0, 2]}
MOE = {"num_experts": 4, "ep": 2}
IN_FP32 = ("--accumulate-allreduce-grads-in-fp32",)  # what bf16 has by default
CASES = [
    Case("dp4", {}, HALVES, 6 + 12 * 2 / 4),
    Case("tp2 dp2 fp16", {"tp": 2, "dtype": "fp16"}, HALVES, 6 + 12 * 2 / 2, IN_FP32, later=1e-5),
    Case("pp2 dp2 overlap", {"pp": 2, "overlap": True}, {"dense": [0, 1]}, 6 + 12 * 2 / 2),
    Case("ep2 dp4", MOE, EXPERTS, None, sample=True),
    Case("ep2 dp4 overlap", {**MOE, "overlap": True}, EXPERTS, None),
    Case("dp4 fp32", {"dtype": "fp32"}, HALVES, 8 + 8 * 2 / 4),
    Case("dp4 overlap", {"overlap": True}, HALVES, 6 + 12 * 2 / 4),
    Case("dp4 bf16 gradients", {}, HALVES, 4 + 16 * 2 / 4, ("--grad-reduce-in-bf16",), first=1e-3, later=1e-3),
    Case("dp4 mean in the collective", {}, HALVES, 6 + 12 * 2 / 4, ("--ddp-average-in-collective",)),
    Case("ep2 dp4 mean in the collective", MOE, EXPERTS, None, ("--ddp-average-in-collective",)),
    Case("pp2 dp2 dp last", {"pp": 2}, HALVES, 6 + 12 * 2 / 2, ("--use-tp-pp-dp-mapping",)),
    Case("dp4 unsharded optimizer", {"distributed_optimizer": False}, {"dense": [0, 1, 2, 3]}, None),
]
BY_DAY = [pytest.param(case, id=case.name, marks=() if case.sample else pytest.mark.nightly) for case in CASES]


@pytest.fixture(scope="module")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("data") / "text"
    command = [sys.executable, "-m", "mindio_tft_patch.launch.prepare_data", "--output", str(prefix)]
    subprocess.run([*command, "--max-bytes", "200000"], check=True, timeout=TIMEOUT_SECONDS)
    return str(prefix)


@pytest.fixture(params=["wheel", "checkout"])
def megatron(request: pytest.FixtureRequest) -> Version:
    """The installed megatron-core, and the checkout that MEGATRON_LM_PATH names."""
    if request.param == "wheel":
        if importlib.util.find_spec("megatron.training") is None:
            pytest.skip("the installed megatron-core ships no megatron.training; install megatron-core>=0.17")
        return "0.19"
    if not os.environ.get("MEGATRON_LM_PATH"):
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout (core_v0.12.1)")
    return "0.12"


def environment(megatron: Version) -> dict[str, str]:
    """Variables of the job; a checkout goes before the installed Megatron."""
    values = {**os.environ, "OMP_NUM_THREADS": "1"}
    if megatron == "0.12":
        paths = (os.environ["MEGATRON_LM_PATH"], os.environ.get("PYTHONPATH"))
        values["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return values


def run(layout: str, megatron: Version, folder: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Train and return the reports of the ranks."""
    report = folder / layout
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    script = [str(ROOT / "launch" / "pretrain_gpt.py")]
    save = ["--save", str(folder / f"{layout}_checkpoints"), "--save-interval", "1000"]  # at the end, in this layout
    job = [str(ROOT / "tests" / "support" / "parity_job.py"), layout, str(report)]
    result = subprocess.run(
        [*launcher, "--master-port", str(free_port()), *job, *script, *arguments, *save],
        env=environment(megatron),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return [json.loads(Path(f"{report}.{rank}").read_text()) for rank in range(RANKS)]


def free_port() -> int:
    """A port that is free now; below the range from which the system takes its own."""
    while True:
        port = random.SystemRandom().randint(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


@pytest.mark.parametrize("case", BY_DAY)
def test_copies_of_the_optimizer_change_nothing_that_is_computed(
    case: Case, megatron: Version, data_prefix: str, tmp_path: Path
) -> None:
    arguments = tiny_gpt_args(data_prefix=data_prefix, megatron=megatron, train_iters=STEPS, **case.arguments)
    arguments += ["--log-num-zeros-in-grad", "--data-cache-path", str(tmp_path / "cache"), *case.extra]

    plain = run("plain", megatron, tmp_path, arguments)
    copies = run("copies", megatron, tmp_path, arguments)

    for before, after in zip(plain, copies, strict=True):
        assert len(after["steps"]) == STEPS
        assert after["unreached"] == []
        for number, (one, other) in enumerate(zip(before["steps"], after["steps"], strict=True)):
            tolerance = case.later if number else case.first
            assert flat(other, tolerance) == pytest.approx(flat(one, tolerance), rel=tolerance)
        for measured, expected, *_ in [*before["memory"], *after["memory"]]:
            assert measured == expected
        if case.per_param is not None:
            (memory,) = after["memory"]
            assert memory[1] / memory[2] == case.per_param
    assert copies[0]["sets"] == case.partners
    assert any(after["steps"][-1][1] for after in copies)  # a norm was reported at all


def flat(step: list[Any], tolerance: float) -> list[float]:
    """Losses, gradient norm and zero count of a step; a skipped step has no norm."""
    losses, norm, zeros = step
    # Rounding to 16 bits makes or unmakes a zero; zeros are compared where nothing else is rounded differently.
    counted = [] if tolerance > DIGITS or zeros is None else [zeros]
    return [*losses, -1.0 if norm is None else norm, *counted]
