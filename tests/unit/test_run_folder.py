"""The launcher's folder in memory: it ends with the launcher, or with the next one after a launcher that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindio_tft_patch.launch.run_folder import VARIABLE, remove_left_overs, run_folder

LAUNCHER = """
import sys
from pathlib import Path
from mindio_tft_patch.launch.run_folder import run_folder
with run_folder(Path(sys.argv[1])):
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def launcher(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    return process


def end(process: subprocess.Popen[str], number: signal.Signals) -> None:
    process.send_signal(number)
    process.wait(10)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()


def test_it_is_named_in_the_environment_and_removed_at_the_end(tmp_path: Path) -> None:
    with run_folder(tmp_path):
        folder = Path(os.environ[VARIABLE])
        assert folder.parent == tmp_path and folder.is_dir()
    assert not folder.exists() and VARIABLE not in os.environ


def test_the_folder_of_a_launcher_that_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, launcher: subprocess.Popen[str]
) -> None:
    [folder] = tmp_path.iterdir()
    (folder / "marks").write_text("x")
    assert remove_left_overs(tmp_path) == [], "its launcher lives"
    end(launcher, signal.SIGKILL)
    assert folder.exists()
    with run_folder(tmp_path):
        assert not folder.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_surely_a_left_over_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mindio-tft-new").mkdir()  # its launcher has not come to the lock yet
    (tmp_path / "mindio-tft-file").write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    (other / "launcher.lock").write_text("")
    (tmp_path / "mindio-tft-link").symlink_to(other)
    assert remove_left_overs(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4
