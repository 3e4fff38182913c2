"""launch/pretrain_gpt.py as a rank of a job that loses a rank: it writes down its steps and, at the end, its state."""

import os
import runpy
import sys
from pathlib import Path

import mindio_tft_patch  # noqa: F401  (first: it must act before Megatron is imported)

sys.path.insert(1, str(Path(__file__).parents[1]))
from bench import timed

timed.take_part(os.environ)
sys.argv[0] = str(Path(__file__).parents[2] / "launch" / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
