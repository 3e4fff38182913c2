"""Jobs of real Megatron for tests: started by a fork server or by the real ttprun, and what can be read of them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "pretrain_gpt.py"
FLAG = "--enable-high-availability"
RANKS = 4
RESTARTING = frozenset({"--enable-worker-reboot", "--distributed-optimizer-no-replica"})
_SPARE_BLANKS = 6

_TIMES = re.compile(r"^\s*\[[^]]*\]|elapsed time per iteration \(ms\): [^|]*\||throughput per GPU [^|]*\|")
_ITERATION = re.compile(r"iteration\s+(\d+)/")


@dataclass(frozen=True)
class JobSpec:
    """A job to be started.

    folder: an empty folder for output, logs and traces; made if need be.
    arguments: of the training script, without the plugin's flags.
    inject: schedule of faults (mindio_tft_patch.fault_injection).
    options: of ttprun.
    """

    folder: Path
    arguments: Sequence[str]
    inject: str = ""
    plugin: bool = True
    environ: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ("--standalone",)

    @property
    def restarts(self) -> bool:
        """Lost ranks are started anew while the others wait."""
        return bool(RESTARTING & set(self.arguments))

    def command_line(self, script: Path = SCRIPT) -> list[str]:
        """Arguments of ttprun."""
        logs = ["--log-dir", str(self.folder / "out"), "--redirects", "3"]
        flags = [FLAG] if self.plugin else []
        return [*self.options, "--nproc-per-node", str(RANKS), *logs, str(script), *self.arguments, *flags]

    def variables(self) -> dict[str, str]:
        """Environment variables of the job."""
        return {
            "OMP_NUM_THREADS": "1",
            "TTP_PORT": str(free_port()),
            "TTP_LOG_PATH": str(self.folder / "logs"),
            "TTP_OT": "60",
            "TFT_COLLECT_SECONDS": "0.1",
            "TFT_TEST_FOLDER": str(self.folder / "trace"),
            "TFT_INJECT": self.inject,
            # A process that takes the place of a lost one must not repeat what has happened.
            **({"TFT_INJECT_STATE": str(self.folder / "fired")} if self.restarts else {}),
            **self.environ,
        }


class Job:
    """A job that runs or has run."""

    def __init__(self, spec: JobSpec, pid: int) -> None:
        self.spec = spec
        self.folder = spec.folder
        self.pid = pid
        self.began = time.monotonic()
        self.code: int | None = None
        self.family: dict[int, psutil.Process] = {}

    def poll(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        raise NotImplementedError

    def look_at_family(self) -> None:
        """Remember the job's processes, also for after the launcher's end."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                self.family.setdefault(process.pid, process)

    def wait(self, seconds: float = 120.0) -> int:
        """Wait for the end; the exit code. A job that is late is killed, and the test fails."""
        deadline = time.monotonic() + seconds
        while self.poll() is None:
            self.look_at_family()
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {seconds} s\n{self.story()}")
            time.sleep(0.05)
        assert self.code is not None
        return self.code

    def wait_for(self, moment: str, step: int, rank: int = 0, seconds: float = 90.0) -> None:
        """Wait until a rank has come to a moment of its trace."""
        deadline = time.monotonic() + seconds
        while (moment, step) not in self.moments(rank):
            assert self.poll() is None and time.monotonic() < deadline, f"no {moment} {step}\n{self.story()}"
            time.sleep(0.02)

    def rank_pids(self) -> dict[int, int]:
        """Process of each rank that runs."""
        pids = {}
        for path in (self.folder / "trace").glob("pid-*"):
            pids[int(path.name[4:])] = int(path.read_text())
        return pids

    def processes(self, rank: int) -> list[int]:
        """All processes that have been a rank, in order."""
        path = self.folder / "trace" / f"pids-{rank}.txt"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def kill(self) -> None:
        """End whatever is left."""
        self.look_at_family()
        for process in [*self.family.values()]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

    def left_over(self, seconds: float = 5.0) -> list[psutil.Process]:
        """Processes of the job that outlive the launcher."""
        return psutil.wait_procs(list(self.family.values()), timeout=seconds)[1]

    # ---------------------------------------------------------------- what it left

    @property
    def launcher_output(self) -> str:
        """What the launcher has printed."""
        path = self.folder / "launcher.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def output(self, rank: int, stream: str = "stdout", attempt: int = 0) -> str:
        """What a rank has printed."""
        found = list((self.folder / "out").glob(f"*/attempt_{attempt}/{rank}/{stream}.log"))
        return found[0].read_text(errors="replace") if found else ""

    def reported(self, key: str) -> str:
        """What follows "ttprun: <key>: " in the launcher's report; empty without such a line."""
        found = re.findall(rf"^ttprun: {key}: (.*)$", self.launcher_output, re.MULTILINE)
        return str(found[-1]) if found else ""

    def records(self) -> list[dict[str, Any]]:
        """Recovery records, from the JSON log."""
        lines = [
            json.loads(line)
            for path in sorted((self.folder / "logs").glob("ttp_log.jsonl*"))
            for line in path.read_text().splitlines()
        ]
        return [line for line in lines if line.get("record") == "recovery"]

    def moments(self, rank: int) -> list[tuple[str, int]]:
        """Trace of a rank."""
        path = self.folder / "trace" / f"moments-{rank}.txt"
        pairs = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(pair[0], int(pair[1])) for pair in pairs if len(pair) == 2]

    def completed(self, rank: int) -> int:
        """Last step that a rank has completed, by its trace; 0: none."""
        return max((step for moment, step in self.moments(rank) if moment == "committed"), default=0)

    def states(self) -> dict[int, dict[str, str]]:
        """Digest of the final state of each rank that came to its end."""
        paths = {rank: self.folder / "trace" / f"state-{rank}.json" for rank in range(RANKS)}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}

    def losses(self) -> dict[int, list[str]]:
        """Megatron's log lines by iteration, without times."""
        lines: dict[int, list[str]] = {}
        for line in self.output(RANKS - 1).splitlines():
            found = _ITERATION.search(line)
            if found and "lm loss" in line:
                lines.setdefault(int(found[1]), []).append(_TIMES.sub("", line).strip())
        return lines

    def validations(self) -> list[str]:
        """Megatron's lines about evaluations, in order."""
        return [line.strip() for line in self.output(RANKS - 1).splitlines() if "validation loss at" in line]

    def story(self) -> str:
        """Everything that helps to understand a failure, shortened."""
        parts = [f"== {self.folder} code {self.code}", self.launcher_output[-3000:]]
        for rank in range(RANKS):
            parts += [f"== rank {rank}: {self.moments(rank)[-4:]}", self.output(rank, "stderr")[-1500:]]
        return "\n".join(parts)


class ProcessJob(Job):
    """A job of the real ttprun."""

    def __init__(self, spec: JobSpec, process: subprocess.Popen[bytes]) -> None:
        super().__init__(spec, process.pid)
        self._process = process

    def poll(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        self.code = self._process.poll()
        return self.code


def start_ttprun(spec: JobSpec) -> Job:
    """Start a job with the installed ttprun and new interpreters."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    wrapper = ROOT / "tests" / "support" / "armed_pretrain.py"
    with (spec.folder / "launcher.txt").open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("ttprun"), *spec.command_line(wrapper)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **spec.variables()},
            cwd=spec.folder,
            start_new_session=True,
        )
    return ProcessJob(spec, process)


class ForkedJob(Job):
    """A job of a fork server."""

    def __init__(self, spec: JobSpec, server: ForkServer, pid: int, number: int) -> None:
        super().__init__(spec, pid)
        self._server = server
        self._number = number

    def poll(self) -> int | None:
        """Exit code of the launcher; None while it runs."""
        if self.code is None:
            self._server.take_in(0.0)
            self.code = self._server.codes.get(self._number)
        return self.code


class ForkServer:
    """Client of support/fork_server.py.

    Args:
        python_path: folders that go first on the server's sys.path, e.g. a Megatron-LM checkout.
        errors: file for what the server itself prints.
    """

    def __init__(self, errors: Path, python_path: Sequence[str] = ()) -> None:
        path = os.pathsep.join([*python_path, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
        self._errors = errors
        with errors.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "support" / "fork_server.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            )
        self._buffer = b""
        self._number = 0
        self._pids: dict[int, int] = {}
        self._ready = False
        self.codes: dict[int, int] = {}

    def start(self, spec: JobSpec, blanks: int | None = None) -> Job:
        """Start a job.

        blanks: processes to keep ready, for ranks, for those that take their place, and for stand-bys; by default a
            few more than the ranks if the job restarts lost ranks.
        """
        if blanks is None:
            blanks = RANKS + (_SPARE_BLANKS if spec.restarts else 0)
        spec.folder.mkdir(parents=True, exist_ok=True)
        self._await(lambda: self._ready, 120.0)
        self._number += 1
        request = {
            "job": self._number,
            "argv": spec.command_line(),
            "environ": spec.variables(),
            "output": str(spec.folder / "launcher.txt"),
            "cwd": str(spec.folder),
            "ranks": blanks,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        number = self._number
        self._await(lambda: number in self._pids, 30.0)
        return ForkedJob(spec, self, self._pids[number], number)

    def take_in(self, seconds: float) -> None:
        """Read what the server says."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        readable, _, _ = select.select([descriptor], [], [], seconds)
        if not readable:
            return
        received = os.read(descriptor, 65536)
        assert received, f"the fork server has ended:\n{self._errors.read_text()[-3000:]}"
        *lines, self._buffer = (self._buffer + received).split(b"\n")
        for line in map(json.loads, lines):
            self._ready = self._ready or "ready" in line
            if "pid" in line:
                self._pids[line["job"]] = line["pid"]
            if "code" in line:
                self.codes[line["job"]] = line["code"]

    def close(self) -> None:
        """End the server and what it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _await(self, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"the fork server says nothing:\n{self._errors.read_text()[-3000:]}"
            self.take_in(0.1)


def free_port() -> int:
    """A port that is free now; below the range from which the system takes its own."""
    while True:
        port = random.SystemRandom().randint(20000, 32000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
