"""A drill with commands that only look like training: how it ends, and what it starts again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

FAULT = "rank=1,step=5,moment=forward,kind=exception"
DRILL = ["env", "--default-signal", sys.executable, "-m", "mindio_tft_patch.cli", "drill"]

# Writes what the controller writes at the end of a recovery. Its words: kind of the fault, its rank.
RECORD = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["TTP_LOG_PATH"])
folder.mkdir(parents=True, exist_ok=True)
rank = None if sys.argv[2] == "job" else int(sys.argv[2])
record = {"time": time.time(), "record": "recovery", "fault": [{"rank": rank, "kind": sys.argv[1]}], "ranks": [],
          "seconds_in_all": 0.01, "seconds": {"dump": 0.01}, "strategy": "dump", "step": 4, "recomputed_steps": 0,
          "attempts": 1, "checkpoint": "/c/iter_0000004", "reason": "dump after " + sys.argv[1]}
with (folder / "ttp_log.jsonl.1").open("a") as log:
    log.write(json.dumps(record) + chr(10))
"""
FIRED = """
import os, pathlib
from mindio_tft_patch.fired_faults import FiredFaults
FiredFaults(pathlib.Path(os.environ["TFT_INJECT_STATE"])).claim(0, "", 4)
"""


def job(folder: Path, script: str) -> list[str]:
    """A command that runs a shell script, in which $record and $fired are commands."""
    path, words = folder / "job.sh", [f"echo started >> {folder / 'starts'}", script]
    for name, text in (("fired", FIRED), ("record", RECORD)):
        (folder / f"{name}.py").write_text(text)
        words.insert(0, f'{name}="{sys.executable} {folder / name}.py"')
    path.write_text("\n".join(words))
    return ["sh", str(path)]


def starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


def drill(folder: Path, script: str, *own: str) -> subprocess.Popen[str]:
    command = [*DRILL, "--faults", FAULT, "--out", str(folder / "out"), *own, "--", *job(folder, script)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def report(folder: Path) -> Any:
    return json.loads((folder / "out" / "report.json").read_text())


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} has not come"
        time.sleep(0.02)


def saving(folder: Path) -> str:
    """A script that starts a launcher, which saves on a signal, once, and ends a while after the script."""
    (folder / "launcher.sh").write_text(
        f"trap '$record terminated job; sleep 0.5; echo saved >> {folder / 'saved'}; exit 1' TERM HUP INT\n"
        f"echo x > {folder / 'begun'}\n"
        "while :; do sleep 0.1; done\n"
    )
    return f"export record\nsh {folder / 'launcher.sh'}\nexit 1"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_the_drill_after_the_command_has_saved(number: signal.Signals, tmp_path: Path) -> None:
    started = drill(tmp_path, saving(tmp_path), "--resume")
    with started:
        wait_for(tmp_path / "begun")
        os.kill(started.pid, number)
        output, _ = started.communicate(timeout=120)
    assert started.returncode == 128 + number, output
    assert (tmp_path / "saved").read_text() == "saved\n"
    assert starts(tmp_path) == 1
    told = report(tmp_path)
    assert not told["ok"] and told["runs"][0]["signal"] == number
    assert told["problems"][0] == f"{number.name} has ended the drill before its end"
    assert "fault 1 has not happened: the drill was ended before" in told["problems"]


def test_a_signal_during_the_run_to_compare_with_starts_no_other_run(tmp_path: Path) -> None:
    started = drill(tmp_path, saving(tmp_path), "--compare")
    with started:
        wait_for(tmp_path / "begun")
        started.terminate()
        output, _ = started.communicate(timeout=120)
    assert started.returncode == 143, output
    assert starts(tmp_path) == 1 and (tmp_path / "saved").exists()
    assert report(tmp_path)["runs"] == [] and report(tmp_path)["comparison"] is None


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    begun = f"echo x > {tmp_path / 'begun'}; sleep 1; exit 0"
    command = ["env", "--ignore-signal=HUP", *DRILL[2:], "--faults", FAULT, "--out", str(tmp_path / "out"), "--"]
    with subprocess.Popen([*command, *job(tmp_path, begun)], stdout=subprocess.DEVNULL) as started:
        wait_for(tmp_path / "begun")
        os.kill(started.pid, signal.SIGHUP)
        assert started.wait(timeout=60) == 1
    assert report(tmp_path)["runs"][0]["signal"] == 0


def test_a_job_that_something_else_has_ended_is_not_started_again_and_is_not_ok(tmp_path: Path) -> None:
    with drill(tmp_path, "$record terminated job; exit 1", "--resume") as started:
        output, _ = started.communicate(timeout=120)
    assert (started.returncode, starts(tmp_path)) == (1, 1), output
    assert any("for which no fault of the schedule accounts: dump after" in one for one in report(tmp_path)["problems"])


def test_a_job_that_a_fault_has_ended_with_a_checkpoint_is_started_again(tmp_path: Path) -> None:
    script = f"[ $(wc -l < {tmp_path / 'starts'}) = 1 ] || exit 0\n$fired; $record exception 1; exit 1"
    with drill(tmp_path, script, "--resume") as started:
        output, _ = started.communicate(timeout=120)
    assert (started.returncode, starts(tmp_path)) == (0, 2), output
    assert report(tmp_path)["ok"] and [run["code"] for run in report(tmp_path)["runs"]] == [1, 0]


def test_a_run_that_fails_after_a_good_one_is_not_ok(tmp_path: Path) -> None:
    script = f"[ $(wc -l < {tmp_path / 'starts'}) = 1 ] || exit 9\n$fired; $record exception 1; exit 1"
    with drill(tmp_path, script, "--resume") as started:
        output, _ = started.communicate(timeout=120)
    assert (started.returncode, starts(tmp_path)) == (1, 2), output
    assert report(tmp_path)["problems"] == ["run 2 ended with exit code 9, for which no fault of the schedule accounts"]


def test_what_the_limit_ends_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    with drill(tmp_path, saving(tmp_path), "--limit", "5") as started:
        output, _ = started.communicate(timeout=120)
    assert started.returncode == 1, output
    assert (tmp_path / "saved").exists(), "the launcher was left behind"
    assert "the job did not end within --limit and was ended" in report(tmp_path)["problems"]


@pytest.mark.parametrize(
    ("own", "command", "told"),
    [
        (["--faults", "rank=1"], "sh", "mindio-tft: --faults: 'rank=1' is not a fault"),
        (["--faults", "rank=1,step=5,moment=lunch,kind=exit"], "sh", "mindio-tft: --faults: "),
        (["--faults", FAULT], "/nowhere/train", "The training command cannot be started"),
        (["--random", "0", "--ranks", "2", "--steps", "9"], "sh", "Raise --random"),
        (["--random", "two"], "sh", "--random"),
    ],
)
def test_wrong_use_is_told_apart_from_a_job_that_did_not_hold(
    own: list[str], command: str, told: str, tmp_path: Path
) -> None:
    words = [*DRILL, *own, "--out", str(tmp_path / "out"), "--", command, "x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr
