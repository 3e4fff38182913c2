"""Runs the training command of a drill, shows its output while it comes, and takes in what it leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindio_tft_patch.errors import ConfigError
from mindio_tft_patch.launch.drill.asked import Asked, lives, send
from mindio_tft_patch.launch.drill.findings import Line, Run, read_line, read_log
from mindio_tft_patch.launch.tail import Tail

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 30.0  # after SIGTERM, for a launcher that saves first


@dataclass(frozen=True)
class Start:
    """One start of the command.

    words: the command. environ: of the process. output: file for what it prints. logs: folder of its JSON log.
    """

    words: Sequence[str]
    environ: Mapping[str, str]
    output: Path
    logs: Path
    limit_seconds: float | None = None


def run(start: Start, asked: Asked) -> Run:
    """Run the command to its end.

    A signal that asks the drill to end is handed on, and what the command then does is waited for; so is the rest of
    its process group: a shell script ends before the launcher that it has started.

    Raises:
        ConfigError: the command cannot be started.
    """
    start.output.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with start.output.open("wb") as output:
        try:
            process = subprocess.Popen(
                [_program(start.words[0], start.environ), *start.words[1:]],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(start.environ),
                # Ctrl-C on a terminal must reach the command once: a second signal means "end at once".
                start_new_session=True,
            )
        except OSError as problem:
            raise ConfigError(
                f"The training command cannot be started: {problem}.", change="Check what follows after `--`."
            ) from problem
    lines: list[Line] = []
    timed_out = False
    tail = Tail(start.output)
    deadline = None if start.limit_seconds is None else time.monotonic() + start.limit_seconds
    asked.running(process.pid)
    try:
        while True:
            ended = process.poll() is not None and not (asked.number and lives(process.pid))
            lines += _show(tail)
            if ended:
                break
            timed_out = timed_out or (deadline is not None and time.monotonic() > deadline)
            if timed_out or asked.impatient:
                _end(process)
            else:
                time.sleep(_LOOK_SECONDS)
    finally:
        asked.running(0)
    ended_at = time.time()
    return Run(
        began,
        ended_at,
        process.returncode,
        tuple(lines),
        tuple(read_logs(start.logs, began, ended_at)),
        timed_out,
        asked.number,
    )


def _program(name: str, environ: Mapping[str, str]) -> str:
    return shutil.which(name, path=environ.get("PATH")) or name


def _show(tail: Tail) -> list[Line]:
    """Print what has come; the lines of iterations among it."""
    found = []
    for text in tail.lines():
        sys.stdout.write(f"{text}\n")
        line = read_line(text, time.time())
        if line is not None:
            found.append(line)
    sys.stdout.flush()
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the command and what it has started: twice SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        send(process.pid, number)
        deadline = time.monotonic() + _GRACE_SECONDS / 2
        while time.monotonic() < deadline:
            if process.poll() is not None and not lives(process.pid):
                return
            time.sleep(_LOOK_SECONDS)


def read_logs(folder: Path, began: float, ended: float) -> list[Mapping[str, object]]:
    """What all processes of a run have written to its JSON logs, by time. began, ended: seconds since 1970."""
    lines = []
    for path in folder.glob("ttp_log.jsonl*"):
        # A folder that is used again has the lines of earlier jobs.
        if path.stat().st_mtime >= began - 1.0:
            lines += path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [fields for fields in read_log(lines) if began <= float(fields["time"]) <= ended + 1.0]


def environment(
    base: Mapping[str, str], variables: Mapping[str, str], logs: Path, schedule: str, fired: Path
) -> dict[str, str]:
    """Environment of the command.

    Args:
        base: of this process. variables: that stand in front of the command.
        logs: folder for the log, unless TTP_LOG_PATH names one.
        schedule: empty: the job without faults. fired: folder in which ranks note what has happened.
    """
    made = {**base, **variables}
    made["TTP_LOG_PATH"] = str(Path(made.get("TTP_LOG_PATH") or logs).absolute())
    made["TTP_LOG_STDOUT"] = "0"  # the report is made from the files
    if made.get("TTP_LOG_LEVEL") != "DEBUG":
        made["TTP_LOG_LEVEL"] = "INFO"  # the record of a recovery has this level
    # `ttprun` is beside this interpreter also where its environment was not activated.
    made["PATH"] = os.pathsep.join([made.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    made["PYTHONUNBUFFERED"] = "1"  # lines that a killed rank had printed should not be lost
    made.pop("TFT_INJECT", None)
    made.pop("TFT_INJECT_STATE", None)
    if schedule:
        made |= {"TFT_INJECT": schedule, "TFT_INJECT_STATE": str(fired)}
    return made
