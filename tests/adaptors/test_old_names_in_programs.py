"""What `import mindio_ttp` alone does to a program: to torchrun's script, and to a training script with our flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindio_tft_patch.old_names import PTH_LINE

TORCHRUN = """
import mindio_ttp.framework_ttp
from torch.distributed.elastic.multiprocessing.api import PContext
print("patient" if getattr(PContext, "_mindio_tft_patience", False) else "impatient")
"""
TRAINING = """
import sys
import mindio_ttp.framework_ttp
import mindio_tft_patch
print("patched" if mindio_tft_patch.installation() else "not patched", "torch" in sys.modules)
"""


def run(folder: Path, name: str, script: str, *flags: str) -> str:
    """Run a program as in an environment in which the wheel is installed."""
    program = folder / name
    program.write_text(f"exec({PTH_LINE!r}, {{}})\n{script}")
    ended = subprocess.run(
        [sys.executable, str(program), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "TFT_MINDIO_TTP": "ours"},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.nightly
def test_in_the_script_of_torchrun_it_lengthens_patience(tmp_path: Path) -> None:
    assert run(tmp_path, "torchrun", TORCHRUN) == "patient\n"


def test_in_a_training_script_it_patches_nothing_whatever_the_flags(tmp_path: Path) -> None:
    flags = ("--enable-high-availability", "--distributed-backend", "gloo")
    assert run(tmp_path, "pretrain_gpt.py", TRAINING, *flags) == "not patched False\n"
