"""The example script of MindSpeed-LLM."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from mindio_tft_patch.config import FEATURE_FLAGS, HBM_FLAG, MASTER_FLAG, NO_REPLICA_FLAG, REBOOT_FLAG

SCRIPT = Path(__file__).parents[2] / "launch" / "examples" / "pretrain_llama2_7b_ptd.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")


def test_a_shell_can_read_it() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_it_switches_on_what_the_guide_of_the_original_adds_behind_bf16() -> None:
    words = TEXT.replace("\\\n", " ").split()
    place = words.index("--bf16")
    assert words[place + 1 : place + 5] == [MASTER_FLAG, HBM_FLAG, REBOOT_FLAG, NO_REPLICA_FLAG]
    assert set(words) & {MASTER_FLAG, *FEATURE_FLAGS} == {MASTER_FLAG, HBM_FLAG, REBOOT_FLAG, NO_REPLICA_FLAG}


def test_it_sets_what_the_guide_sets() -> None:
    assert "export GLOO_SOCKET_IFNAME=" in TEXT and "export TTP_ADDR=" in TEXT
    assert re.search(r"^source .*/set_env\.sh$", TEXT, re.MULTILINE)


def test_ttprun_starts_it() -> None:
    assert re.search(r"^ttprun \$DISTRIBUTED_ARGS pretrain_gpt\.py", TEXT, re.MULTILINE)
    assert "torchrun" not in re.sub(r"^#.*$", "", TEXT, flags=re.MULTILINE)
