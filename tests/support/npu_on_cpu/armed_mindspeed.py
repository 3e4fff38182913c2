"""MindSpeed-LLM's own pretrain_gpt.py with `import mindio_tft_patch` in front, and faults and traces for tests.

TFT_TEST_RAISE="10:1:UCE ERROR"   in front of that step (counted from 0) rank 1 raises a RuntimeError with this
                                  text and the other ranks one with "FORCE STOP", once in the job: what
                                  MindSpeed-LLM's own tests do with sed
TFT_TEST_FOLDER                   as in support.inject
"""

import os
import runpy
import sys
from pathlib import Path

import mindio_tft_patch  # noqa: F401  (first: it must act before MindSpeed patches Megatron)

sys.path.insert(1, str(Path(__file__).parents[2]))
from support.npu_on_cpu import faults

faults.arm(os.environ)
sys.argv[0] = str(Path(os.environ["MINDSPEED_LLM_PATH"]) / "pretrain_gpt.py")
sys.path[0] = os.environ["MINDSPEED_LLM_PATH"]
runpy.run_path(sys.argv[0], run_name="__main__")
