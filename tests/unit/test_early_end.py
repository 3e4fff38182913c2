"""What the launcher says last of a job in which no rank has registered, and none has said why."""

from __future__ import annotations

import pytest

from mindio_tft_patch.adaptors.unknown_words import meant_flag, misspelt
from mindio_tft_patch.launch.early_end import likely_causes

FLAG = "--enable-high-availability"
PROTECTED = "import mindio_tft_patch\nimport megatron\n"


def test_a_script_that_imports_the_plugin_is_not_asked_whether_it_does() -> None:
    for text in (PROTECTED, "def main():\n    import mindio_tft_patch\n", "import mindio_tft_patch\ndef (\n"):
        assert "import mindio_tft_patch" not in "\n".join(likely_causes("train.py", text, [FLAG]))


def test_a_script_without_the_import_is_told_so() -> None:
    (line,) = likely_causes("train.py", "import megatron\n", [FLAG])
    assert "train.py does not import mindio_tft_patch" in line


def test_a_script_that_was_not_read_is_asked() -> None:
    (line,) = likely_causes("package.train", None, [FLAG])
    assert line.endswith("does the script begin with `import mindio_tft_patch`?")


@pytest.mark.parametrize("text", [PROTECTED, None, "import megatron\n"])
def test_a_misspelt_flag_is_named_with_the_one_that_was_meant(text: str | None) -> None:
    said = likely_causes("train.py", text, [FLAG, "--enable-workers-reboot", "--lr", "0.1"])
    assert "--enable-workers-reboot is not a flag" in said[-1] and "write --enable-worker-reboot." in said[-1]
    assert ("does not import" in said[0]) is (text == "import megatron\n")


def test_what_is_like_none_of_our_flags_is_left_alone() -> None:
    assert meant_flag("--enable-hbmfault-repairs=1") == "--enable-hbmfault-repair"
    assert misspelt([FLAG, "--enable-worker-reboot", "--lr", "enable-workers-reboot", "--enable-msc"]) == {}
