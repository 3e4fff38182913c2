"""Unmodified Megatron trains on CPU over gloo, and does so reproducibly."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from support.tiny_gpt import tiny_gpt_args

pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "launch" / "pretrain_gpt.py"
TIMEOUT_SECONDS = 240
# What a Megatron-LM checkout imports beyond what the megatron-core wheel does.
CHECKOUT_NEEDS = ("six", "regex", "yaml", "einops")

Version = Literal["0.19", "0.12"]


@pytest.fixture(scope="module")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Real text as a Megatron dataset."""
    prefix = tmp_path_factory.mktemp("data") / "text"
    command = [sys.executable, "-m", "mindio_tft_patch.launch.prepare_data", "--output", str(prefix)]
    subprocess.run([*command, "--max-bytes", "200000"], check=True, timeout=TIMEOUT_SECONDS)
    return str(prefix)


@pytest.fixture(params=["wheel", "checkout"])
def megatron(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Version:
    """The installed megatron-core, and the checkout that MEGATRON_LM_PATH names."""
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


def train(arguments: list[str], *, ranks: int) -> list[str]:
    """Train and return the losses as logged, one for each iteration.

    TFT_DEVICE is unset: `--distributed-backend gloo` alone must bring in the stand-in.
    """
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environ.pop("TFT_DEVICE", None)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [*launcher, str(SCRIPT), *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-6000:]
    return re.findall(r"\] iteration .*? lm loss: (\S+)", result.stdout)


def test_a_tiny_gpt_trains_and_two_runs_are_equal(data_prefix: str, megatron: Version, tmp_path: Path) -> None:
    arguments = tiny_gpt_args(data_prefix=data_prefix, megatron=megatron, train_iters=5, dropout=0.1)
    # The dataset's index cache must not decide: the first run builds it, the second one reads it.
    arguments += ["--data-cache-path", str(tmp_path)]

    first, second = train(arguments, ranks=2), train(arguments, ranks=2)

    losses = [float(loss) for loss in first]
    assert len(losses) == 5
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]
    assert first == second
