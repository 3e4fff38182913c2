"""Jobs of the tiny trainer for tests: started by the fork server, and what can be read of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.in_place_matrix import ITERATIONS, SAVE_EVERY
from support.jobs import ForkServer, Job, JobSpec, ProcessJob

FOLDER = Path(__file__).parent
IN_PLACE = ("--enable-hbmfault-repair", "--enable-worker-reboot")
TOPOLOGIES: dict[str, tuple[str, ...]] = {"dp4": (), "tp2dp2": ("--tensor-parallel", "2")}


@dataclass(frozen=True)
class TinySpec(JobSpec):
    """A job of a script in this folder."""

    script: Path = FOLDER / "train.py"

    def command_line(self, script: Path | None = None) -> list[str]:
        """Arguments of ttprun."""
        return super().command_line(script or self.script)

    def variables(self) -> dict[str, str]:
        """Environment variables of the job."""
        return {**super().variables(), "TFT_ADAPTOR": "own", "TFT_DEVICE": "cpu"}


def start_really(spec: TinySpec, launcher: str) -> Job:
    """Start a job with an installed launcher and new interpreters."""
    spec.folder.mkdir(parents=True, exist_ok=True)
    with (spec.folder / "launcher.txt").open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name(launcher), *spec.command_line()],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **spec.variables()},
            cwd=spec.folder,
            start_new_session=True,
        )
    return ProcessJob(spec, process)


class TinyJobs:
    """Starts jobs of one test.

    Args:
        folder: for their files.
        server: where they are forked.
    """

    def __init__(self, folder: Path, server: Callable[[], ForkServer]) -> None:
        self.folder = folder
        self.save = folder / "save"
        self.started: list[Job] = []
        self._server = server

    def start(
        self,
        name: str,
        inject: str = "",
        arguments: Sequence[str] = IN_PLACE,
        *,
        topology: str = "dp4",
        script: str = "train.py",
        plugin: bool = True,
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = ("--standalone",),
        steps: int = ITERATIONS,
        launcher: str = "",
    ) -> Job:
        """Start a job that loads from and saves to `save`.

        name: of its folder.
        launcher: an installed one ("ttprun", "torchrun"), with new interpreters; default: the fork server.
        """
        spec = TinySpec(
            self.folder / name,
            [
                *(f"--steps {steps} --save {self.save} --save-interval {SAVE_EVERY}".split()),
                *TOPOLOGIES[topology],
                *arguments,
            ],
            inject,
            plugin,
            environ or {},
            options,
            script=FOLDER / script,
        )
        self.started.append(start_really(spec, launcher) if launcher else self._server().start(spec))
        return self.started[-1]

    def run(self, name: str, inject: str = "", arguments: Sequence[str] = IN_PLACE, **named: object) -> Job:
        """Start a job and wait for its end."""
        job = self.start(name, inject, arguments, **named)  # type: ignore[arg-type]
        job.wait(240.0)
        return job

    def begin_anew(self) -> None:
        """Forget the checkpoints."""
        shutil.rmtree(self.save, ignore_errors=True)
