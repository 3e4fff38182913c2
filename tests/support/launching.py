"""Starts launchers for tests: forked from a process that has imported torch already, which saves seconds each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

TOY_JOB = str(Path(__file__).with_name("toy_job.py"))


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Launched:
    """A launcher that runs. Its ranks are its children; `family` remembers them beyond its death."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid = pid
        self._output = output
        self.code: int | None = None
        self.family: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        """What launcher and ranks have written so far."""
        return self._output.read_text(errors="replace")

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self.code is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(self.pid).children(recursive=True):
                    self.family.setdefault(process.pid, process)
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def wait_for(self, *texts: str, seconds: float = 90.0) -> None:
        """Wait until every text stands in the output."""
        deadline = time.monotonic() + seconds
        while not all(text in self.output for text in texts):
            code = self.poll()
            assert code is None, f"ended with {code} before {texts}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {texts} within {seconds} s:\n{self.output}"
            time.sleep(0.02)

    def wait(self, seconds: float = 90.0) -> int:
        """Wait for the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            assert time.monotonic() < deadline, f"still running after {seconds} s:\n{self.output}"
            time.sleep(0.02)
        assert self.code is not None
        return self.code

    def rank_pids(self) -> dict[int, int]:
        """Global rank -> process id, from the environment of the launcher's children."""
        self.poll()
        pids: dict[int, int] = {}
        for process in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                pids[int(process.environ()["RANK"])] = process.pid
        return pids

    def leftovers(self, seconds: float = 3.0) -> list[psutil.Process]:
        """Processes of the family that live on."""
        return psutil.wait_procs(list(self.family.values()), timeout=seconds)[1]

    def kill(self) -> None:
        """End whatever is left of it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(10.0)
        for process in self.leftovers(0.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def launch(main: str, arguments: Sequence[str], output: Path, environ: Mapping[str, str]) -> Launched:
    """Start a launcher.

    Args:
        main: "ttprun" or "torchrun".
        arguments: its command line.
        output: file for standard output and error of it and its ranks.
        environ: variables on top of this process's.
    """
    # Here, not in the child: this is what the fork is for.
    from torch.distributed import run

    from mindio_tft_patch.launch import agent, ttprun  # noqa: F401

    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Launched(pid, output)
    code = 97
    try:
        os.setsid()
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        os.environ.update(environ)
        sys.argv = [main, *arguments]
        try:
            (ttprun.main if main == "ttprun" else run.main)(list(arguments))
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            code = 1
        sys.stderr.flush()
    finally:
        os._exit(code)
