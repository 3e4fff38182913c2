"""The conductor: starts jobs whose ranks train block by block when told to (conducted.py), and takes their times."""

from __future__ import annotations

import json
import os
import select
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from support.jobs import FLAG, ForkServer, Job, JobSpec

SOCKET = "TFT_BENCH_SOCKET"
SCRIPT = Path(__file__).with_name("rank.py")
_START_SECONDS, _ANSWER_SECONDS = 180.0, 600.0


@dataclass(frozen=True)
class BenchSpec(JobSpec):
    """A job of a benchmark, under ttprun, with the product's own defaults where the tests have others.

    flags: of the plugin.
    conducted: its ranks wait for a conductor; else they train like those of any job, and leave the tests' traces.
    """

    ranks: int = 4
    conducted: bool = True
    flags: Sequence[str] = (FLAG,)

    def command_line(self, script: Path = SCRIPT) -> list[str]:
        """Arguments of ttprun."""
        logs = ["--log-dir", str(self.folder / "out"), "--redirects", "3"]
        flags = self.flags if self.plugin else ()
        script = script if self.conducted else SCRIPT.parents[2] / "launch" / "pretrain_gpt.py"
        return [*self.options, "--nproc-per-node", str(self.ranks), *logs, str(script), *self.arguments, *flags]

    def variables(self) -> dict[str, str]:
        """Environment variables of the job."""
        variables = {**super().variables(), "TFT_COLLECT_SECONDS": "", "TTP_OT": "", **self.environ}
        if self.conducted:
            # A job that waits for its turn makes no progress, which is no fault here.
            variables |= {"TFT_HANG_SECONDS": "86400", "TFT_HEARTBEATS_MISSED": "1000"}
            del variables["TFT_TEST_FOLDER"]  # no trace: writing it costs time
        return variables


@dataclass(frozen=True)
class _Peer:
    """Line to a rank."""

    connection: socket.socket
    lines: TextIO


class ConductedJob:
    """A job that trains when told to.

    Args:
        server: where it is forked.
        spec: without the socket's variable.
    """

    def __init__(self, server: ForkServer, spec: BenchSpec) -> None:
        self.ranks = spec.ranks
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            path = os.path.join(folder, "socket")  # short: such paths have a limit of about 100 characters
            listener.bind(path)
            listener.listen(spec.ranks)
            listener.settimeout(1.0)
            environ = {**spec.environ, SOCKET: path}
            self.job: Job = server.start(BenchSpec(**{**vars(spec), "environ": environ}), blanks=spec.ranks)
            self._peers = self._accept(listener)

    def _accept(self, listener: socket.socket) -> dict[int, _Peer]:
        peers: dict[int, _Peer] = {}
        deadline = time.monotonic() + _START_SECONDS
        while len(peers) < self.ranks:
            self._check(deadline)
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            connection.settimeout(None)
            peer = _Peer(connection, connection.makefile("r", encoding="utf-8"))
            peers[json.loads(peer.lines.readline())["rank"]] = peer
        return peers

    def block(self, mode: str, steps: int, untimed: int = 0) -> list[dict[str, Any]]:
        """Train; what each rank says of it."""
        answers = self.ask({"do": "block", "mode": mode, "steps": steps, "untimed": untimed})
        for one in answers:
            # Was measured what was meant? The plugin is called several times in each step, or never.
            expected = one["calls"] == 0 if mode in ("off", "plain") else one["calls"] >= 4 * steps
            if not expected:
                raise RuntimeError(f"mode {mode}: the plugin was called {one['calls']} times in {steps} steps")
        return answers

    def seconds(self, mode: str, steps: int, untimed: int = 0) -> float:
        """Train; seconds of a step."""
        return max(one["seconds"] for one in self.block(mode, steps, untimed)) / steps

    def ask(
        self, command: Mapping[str, Any], ranks: Sequence[int] | None = None, own: Mapping[int, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Have some ranks, or all, do something at the same time; their answers, in the order of the ranks.

        own: what is added to the command for a single rank.
        """
        ranks = range(self.ranks) if ranks is None else ranks
        for rank in ranks:
            try:
                self._say(rank, {**command, **((own or {}).get(rank, {}))})
            except OSError:
                self._tell_of_the_end_of(rank)
        deadline = time.monotonic() + _ANSWER_SECONDS
        return [self._answer(rank, deadline) for rank in ranks]

    def end(self) -> None:
        """Let all ranks leave, in good order if possible."""
        try:
            for rank in self._peers:
                self._say(rank, {"do": "end"})
            self.job.wait(30.0)
        except (OSError, AssertionError):
            self.job.kill()

    def _say(self, rank: int, command: Mapping[str, Any]) -> None:
        self._peers[rank].connection.sendall(json.dumps(command).encode() + b"\n")

    def _answer(self, rank: int, deadline: float) -> dict[str, Any]:
        peer = self._peers[rank]
        # One answer for each command: nothing is left in the buffer of `lines` when select looks at the socket.
        while not select.select([peer.connection], [], [], 1.0)[0]:
            self._check(deadline)
        line = peer.lines.readline()
        if not line:
            self._tell_of_the_end_of(rank)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tell_of_the_end_of(self, rank: int) -> NoReturn:
        time.sleep(2.0)  # for the launcher, to tell why
        raise RuntimeError(f"rank {rank} has ended\n{self.job.story()}")

    def _check(self, deadline: float) -> None:
        if self.job.poll() is not None or time.monotonic() > deadline:
            self.job.kill()
            raise RuntimeError(f"the job has ended or is late\n{self.job.story()}")
