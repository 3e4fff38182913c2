"""launch/pretrain_gpt.py with the faults and traces of support.inject, for jobs of the real launcher."""

import os
import runpy
import sys
from pathlib import Path

import mindio_tft_patch  # noqa: F401  (first: it must act before Megatron is imported)

sys.path.insert(1, str(Path(__file__).parents[1]))
from support import inject

inject.arm(os.environ)
sys.argv[0] = str(Path(__file__).parents[2] / "launch" / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
