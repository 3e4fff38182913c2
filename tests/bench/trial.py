"""One job of a contender: unbroken, or with a rank that is killed at a chosen point of a step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.contenders import RANKS, Contender
from bench.family import Family
from bench.schedule import Kill
from bench.step_log import Line, complete_steps, read_lines

_START_SECONDS, _READY_SECONDS, _STEP_SECONDS, _END_SECONDS = 240.0, 120.0, 60.0, 240.0
_IDLE_SECONDS = 0.7  # without any CPU time, after which a helper process counts as ready
_POLL_SECONDS = 0.002


class TrialError(Exception):
    """A job did not do what the measurement needs."""


@dataclass(frozen=True)
class Trial:
    """A job that has come to its end.

    folder: what it has left. killed: monotonic seconds; None: nobody was killed.
    """

    folder: Path
    killed: float | None

    def lines(self) -> list[Line]:
        """Steps of all processes."""
        return _lines(self.folder)

    def log(self) -> list[Mapping[str, Any]]:
        """JSON log of the plugin, of all processes."""
        lines: list[Mapping[str, Any]] = []
        for path in sorted((self.folder / "logs").glob("ttp_log.jsonl*")):
            for text in path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # the last line of a killed process
                    lines.append(json.loads(text))
        return lines


def run(contender: Contender, folder: Path, kill: Kill | None = None, environ: Mapping[str, str] = {}) -> Trial:
    """Run a job to its end.

    Raises:
        TrialError: it ended early, or was late.
    """
    family = contender.launch(folder, environ)
    try:
        return _run(contender, family, kill)
    except TrialError as error:
        raise TrialError(f"{contender.name}: {error}\n{family.story()}") from error
    finally:
        family.end()


def _run(contender: Contender, family: Family, kill: Kill | None) -> Trial:
    folder = family.folder

    def wait_until(what: str, condition: Callable[[], bool], seconds: float, poll: float = 0.05) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TrialError(f"{what}: not within {seconds:.0f} s")
            if not family.running() and not condition():
                raise TrialError(f"{what}: all processes have ended before")
            time.sleep(poll)

    wait_until("ranks at the step before which they wait", lambda: _count(folder, "held-*") >= RANKS, _START_SECONDS)
    if kill is not None and contender.idle_helper():
        idle = _Idle(family, contender.idle_helper())
        wait_until("a helper process that is ready", idle, _READY_SECONDS, 0.2)
    (folder / "go").touch()
    killed = None
    if kill is not None:
        pid = int((folder / f"pid-{kill.rank}").read_text())
        victim = folder / f"steps-{pid}.txt"
        wait_until(
            f"step {kill.step} of rank {kill.rank}",
            lambda: _last_step(victim) >= kill.step,
            _STEP_SECONDS,
            _POLL_SECONDS,
        )
        time.sleep(kill.fraction * median(step.seconds for step in complete_steps(_lines(folder))))
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
    # That the job ends well after that is for tests to show.
    ends = contender.ends(killed is not None)
    wait_until(f"{ends} ranks at the end", lambda: len(contender.end_files(folder)) >= ends, _END_SECONDS)
    return Trial(folder, killed)


class _Idle:
    """Whether a process of the family has nothing to do any more.

    Args:
        command: part of its command line.
    """

    def __init__(self, family: Family, command: str) -> None:
        self._family = family
        self._command = command
        self._used: tuple[int, float] | None = None
        self._since = 0.0

    def __call__(self) -> bool:
        """Look again."""
        now = time.monotonic()
        for process in self._family.members():
            with suppress(psutil.Error):
                if self._command in process.cmdline():
                    times = process.cpu_times()
                    used = (process.pid, times.user + times.system)
                    # One that waits for a core is not idle.
                    if used != self._used or process.status() != psutil.STATUS_SLEEPING:
                        self._used, self._since = used, now
                    return now - self._since >= _IDLE_SECONDS and used[1] > 0.5
        return False


def _count(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def _lines(folder: Path) -> list[Line]:
    return [line for path in folder.glob("steps-*.txt") for line in read_lines(path.read_text())]


def _last_step(path: Path) -> int:
    return max((line.step for line in read_lines(path.read_text())), default=0)
