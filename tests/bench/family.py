"""The processes of one job, whatever starts them: to start, to watch, and to end without leaving any."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from bench.step_writer import FOLDER

_LATE_SECONDS = 10.0


class Family:
    """Processes that were started for a job, and all that these have started.

    Args:
        folder: for their output; in their environment, by which they are known.
        environ: variables on top of this process's.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.environ = {**os.environ, **environ, FOLDER: str(folder)}
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._servers: set[str] = set()

    def start(
        self, name: str, command: Sequence[str | Path], environ: Mapping[str, str] = {}, *, serves: bool = False
    ) -> None:
        """Start a process; its output goes to <folder>/<name>.txt.

        serves: it runs until it is ended, and does not count as running.
        """
        if serves:
            self._servers.add(name)
        with (self.folder / f"{name}.txt").open("wb") as output:
            self._started[name] = subprocess.Popen(
                [str(word) for word in command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.environ, **environ},
                cwd=self.folder,
                start_new_session=True,
            )

    def running(self) -> set[str]:
        """Names of the processes that run."""
        return {name for name, code in self.codes().items() if code is None} - self._servers

    def codes(self) -> dict[str, int | None]:
        """Exit code of each; None: it runs."""
        return {name: process.poll() for name, process in self._started.items()}

    def members(self) -> list[psutil.Process]:
        """All processes of the job, also those that have left their session and lost their parent."""
        marker = str(self.folder)
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(FOLDER) == marker:
                    found.append(process)
        return found

    def end(self) -> None:
        """End whatever is left."""
        deadline = time.monotonic() + _LATE_SECONDS
        while time.monotonic() < deadline:
            members = [process for process in self.members() if process.pid != os.getpid()]
            for process in members:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            for started in self._started.values():
                started.poll()
            if not members:
                return
            time.sleep(0.05)

    def story(self, length: int = 1500) -> str:
        """What is needed to understand a failure, shortened."""
        parts = [f"{self.folder}: exit codes {self.codes()}"]
        for path in sorted((*self.folder.glob("*.txt"), *self.folder.glob("out/*/attempt_*/*/stderr.log"))):
            if not path.name.startswith("steps-"):
                parts += [f"== {path.relative_to(self.folder)}", path.read_text(errors="replace")[-length:]]
        return "\n".join(parts)
