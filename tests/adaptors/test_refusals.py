"""What refuses a job early, and how the launcher comes to say it."""

from __future__ import annotations

import argparse
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from mindio_tft_patch.adaptors.doctor import script
from mindio_tft_patch.adaptors.doctor.findings import Finding
from mindio_tft_patch.adaptors.megatron import arguments
from mindio_tft_patch.adaptors.megatron.validate import check_writable
from mindio_tft_patch.adaptors.refusal import tell_launcher
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.launch import prepare_data
from mindio_tft_patch.launch.report import early_lines


def test_a_refusal_reaches_the_launchers_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    tell_launcher("training cannot start.\n  - Add --save.", {"TORCHELASTIC_ERROR_FILE": str(file)})
    told = json.loads(file.read_text())["message"]
    assert early_lines(1, 1, told, ["not this"]) == [
        "the job ended before training: rank 1 ended with exit code 1",
        "training cannot start.",
        "  - Add --save.",
    ]


def test_without_word_from_the_rank_the_launcher_says_what_to_look_at() -> None:
    torchs = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    assert early_lines(0, 2, torchs, ["this"]) == [
        "the job ended before training: rank 0 ended with exit code 2",
        "this",
    ]


def _parse_like_megatron(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
    parser = extra_args_provider(argparse.ArgumentParser(allow_abbrev=False))
    parser.add_argument("--save")
    return parser.parse_args()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "--enable-workers-reboot",
            [
                "Megatron refuses the arguments: unrecognized arguments: --enable-workers-reboot",
                "--enable-workers-reboot is not a flag, so nothing is switched on by it: write --enable-worker-reboot.",
            ],
        ),
        ("--own-option", ["Megatron refuses the arguments: unrecognized arguments: --own-option"]),
    ],
)
def test_an_argument_that_megatron_does_not_know_reaches_the_launchers_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, told: list[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--save", "here", "--enable-high-availability"])
    (patch,) = arguments.patches(Config(high_availability=True))
    assert patch.wrapper(_parse_like_megatron, None, (), {}).save == "here"
    assert not (tmp_path / "error.json").exists()
    sys.argv.append(word)
    with pytest.raises(SystemExit):
        patch.wrapper(_parse_like_megatron, None, (), {})
    assert json.loads((tmp_path / "error.json").read_text())["message"].splitlines() == told


def test_no_error_file_or_one_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    tell_launcher("reason", {})
    tell_launcher("reason", {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "folder" / "error.json")})


def test_a_save_folder_is_made_and_one_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "new" / "folder"))
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(ConfigError, match=r"--save .* cannot be written .*Change --save"):
            check_writable(str(bad))


def _index(path: Path, documents: int) -> None:
    path.write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1) + b"\x00" * 64)
    path.with_suffix(".bin").write_bytes(b"")


def _errors(tmp_path: Path, documents: int, split: str, eval_iters: int = 1) -> list[Finding]:
    _index(tmp_path / "text.idx", documents)
    arguments = {"data_path": [str(tmp_path / "text")], "split": split, "eval_iters": eval_iters}
    return [finding for finding in script.judge_data(arguments) if "waits for ever" in finding.message]


def test_a_split_that_leaves_a_part_without_documents_is_an_error(tmp_path: Path) -> None:
    assert len(_errors(tmp_path, 1, "90,8,2")) == 2
    assert len(_errors(tmp_path, 20, "90,8,2")) == 1
    assert not _errors(tmp_path, 100, "90,8,2")
    assert not _errors(tmp_path, 1, "100,0,0")
    assert not _errors(tmp_path, 1, "90,8,2", eval_iters=0)


def test_a_long_text_becomes_many_documents_and_none_of_it_is_lost(tmp_path: Path) -> None:
    paragraphs = [f"paragraph {number} " + "word " * 60 for number in range(200)]
    text = tmp_path / "my text.txt"
    text.write_text("\n\n".join(paragraphs))
    documents = list(prepare_data._read([text]))
    assert len(documents) > 40
    assert b" ".join(b" ".join(documents).split()) == b" ".join(text.read_bytes().split())


def test_a_text_without_empty_lines_is_cut_too(tmp_path: Path) -> None:
    text = tmp_path / "one line.txt"
    text.write_text("x" * 100_000)
    assert b"".join(prepare_data._read([text])) == b"x" * 100_000
    assert max(map(len, prepare_data._read([text]))) <= 16 * 1024
