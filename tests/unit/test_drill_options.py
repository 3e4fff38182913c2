"""What a drill makes of its command line, and what it refuses before anything starts."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.launch import demo_job
from mindio_tft_patch.launch.drill.job import environment
from mindio_tft_patch.launch.drill.options import Drill, add_arguments, again, elsewhere, prepare

_JOB = "ttprun --nproc-per-node 4 pretrain_gpt.py --enable-high-availability --train-iters 20 --save ckpt"
JOB = _JOB.split()
FAULT = "rank=1,step=5,moment=forward,kind=sigkill"


def parsed(*own: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(own)


def plan(tmp_path: Path, *own: str, job: list[str] | None = None, environ: dict[str, str] | None = None) -> Drill:
    options = parsed(*own, "--out", str(tmp_path / "out"))
    return prepare(options, JOB if job is None else job, environ or {})


def test_a_schedule_is_taken_as_it_is_given(tmp_path: Path) -> None:
    made = plan(tmp_path, "--faults", FAULT)
    assert (made.schedule, len(made.faults), made.ranks, made.words) == (FAULT, 1, 4, tuple(JOB))


def test_the_variable_stands_in_for_the_option(tmp_path: Path) -> None:
    assert plan(tmp_path, environ={"TFT_INJECT": FAULT}).schedule == FAULT


def test_chance_knows_ranks_and_steps_from_the_command(tmp_path: Path) -> None:
    made = plan(tmp_path, "--random", "5", "--seed", "3", "--kinds", "sigkill,exit")
    assert len(made.faults) == 5
    assert {fault.kind for fault in made.faults} <= {"sigkill", "exit"}
    assert all(0 <= fault.rank < 4 and 1 <= fault.step < 20 for fault in made.faults)


def test_variables_in_front_of_the_command_are_split_off(tmp_path: Path) -> None:
    made = plan(tmp_path, "--faults", FAULT, job=["env", "TTP_PORT=8123", "A=b=c", *JOB])
    assert (made.words, dict(made.variables)) == (tuple(JOB), {"TTP_PORT": "8123", "A": "b=c"})


def test_a_script_that_nobody_knows_may_add_the_flag_itself(tmp_path: Path) -> None:
    assert plan(tmp_path, "--faults", FAULT, job=["sh", "train.sh"]).ranks == 0


@pytest.mark.parametrize(
    ("own", "job", "told"),
    [
        ([], None, "no fault"),
        (["--faults", "rank=1"], None, "not a fault"),
        (["--faults", "rank=4,step=5,moment=forward,kind=exit"], None, "rank 4; the job has 4"),
        (["--random", "2", "--kinds", "meteor"], None, "meteor is no kind"),
        (["--random", "2", "--moments", "lunch"], None, "lunch is no moment"),
        (["--random", "30"], None, "do not fit"),
        (["--random", "2"], [word for word in JOB if word not in ("--train-iters", "20")], "--steps"),
        (["--random", "2"], ["sh", "train.sh"], "--ranks"),
        (["--faults", FAULT], [word for word in JOB if not word.startswith("--enable")], "--enable-high-availability"),
        (["--faults", FAULT], ["A=1"], "no word"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, own: list[str], job: list[str] | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plan(tmp_path, *own, job=job)


def test_what_is_to_be_typed_again_gives_the_same_drill(tmp_path: Path) -> None:
    job = ["env", "A=b c", *JOB]
    options = parsed("--faults", f"{FAULT}; {FAULT}", "--compare", "--resume", "--limit", "90")
    first = prepare(options, job, {})
    _, line = again(first, options, tmp_path, {"TFT_SCRUB_INTERVAL": "4", "TFT_INJECT": "old", "HOME": "/x"})
    words = shlex.split(line)
    assert words[:2] == ["mindio-tft", "drill"]
    own, command = words[2 : words.index("--")], words[words.index("--") + 1 :]
    second = prepare(parsed(*own), command, {})
    assert second.variables == {"A": "b c", "TFT_SCRUB_INTERVAL": "4"}
    assert replace(second, variables=first.variables, folder=first.folder) == first


def test_the_demonstration_can_be_repeated_as_a_drill(tmp_path: Path) -> None:
    line = demo_job.again(FAULT, tmp_path / "again/checkpoints", tmp_path / "data/text", 40)
    words = shlex.split(line)
    own, command = words[words.index("drill") + 1 : words.index("--")], words[words.index("--") + 1 :]
    made = prepare(parsed(*own), command, {})
    assert (made.schedule, made.ranks, made.compare) == (FAULT, demo_job.RANKS, True)
    assert made.variables["TFT_DEVICE"] == "cpu" and Path(made.words[made.words.index("--data-path") + 1]).is_absolute()


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert plan(tmp_path, "--faults", FAULT).folder == tmp_path / "out"
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="not empty"):
        plan(tmp_path, "--faults", FAULT)


def test_the_job_to_compare_with_saves_elsewhere_and_loads_what_it_would() -> None:
    words = ["ttprun", "x.py", "--save", "ckpt", "--load", "ckpt", "--tensorboard-dir=tb"]
    changed = elsewhere(words, Path("/d"))
    assert changed == ("ttprun", "x.py", "--save", "/d/save", "--load", "ckpt", "--tensorboard-dir=/d/tensorboard-dir")


def test_the_job_gets_the_schedule_and_a_log_that_can_be_read() -> None:
    base = {"PATH": "/bin", "TTP_LOG_LEVEL": "ERROR", "TTP_LOG_STDOUT": "1", "TFT_INJECT": "old"}
    made = environment(base, {"A": "b"}, Path("/d/logs"), FAULT, Path("/d/fired"))
    assert (made["TFT_INJECT"], made["TFT_INJECT_STATE"]) == (FAULT, "/d/fired")
    assert (made["TTP_LOG_PATH"], made["TTP_LOG_LEVEL"], made["TTP_LOG_STDOUT"]) == ("/d/logs", "INFO", "0")
    assert made["A"] == "b"
    assert "TFT_INJECT" not in environment(base, {}, Path("/d/logs"), "", Path("/d/fired"))
    own = environment({"TTP_LOG_PATH": "/mine"}, {}, Path("/d/logs"), "", Path("/d/fired"))
    assert own["TTP_LOG_PATH"] == "/mine"
