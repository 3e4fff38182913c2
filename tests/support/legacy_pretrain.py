"""pretrain_gpt.py of a Megatron-LM tree of 2023 (MEGATRON_LEGACY_PATH) with the plugin's import in front of it, and a
trace as support.inject makes it.

With TFT_TEST_BY_HAND=1 the tree was edited by hand and protects itself: then HIGH_AVAILABILITY is for the launcher
only, and the import does no more than let the CPU stand in.
"""

import os
import runpy
import sys
from pathlib import Path

TREE = os.environ["MEGATRON_LEGACY_PATH"]
if os.environ.get("TFT_TEST_BY_HAND") == "1":
    os.environ.pop("HIGH_AVAILABILITY", None)
sys.path.insert(0, TREE)
import mindio_tft_patch  # noqa: E402, F401  (first: it must act before Megatron is imported)

sys.path.insert(1, str(Path(__file__).parents[1]))
from support import legacy_inject  # noqa: E402

legacy_inject.arm(os.environ)
sys.argv[0] = str(Path(TREE) / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
