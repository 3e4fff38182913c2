"""Fixtures for jobs of real Megatron."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from support.jobs import ForkServer, Job, JobSpec, start_ttprun
from support.tiny_gpt import tiny_gpt_args

Version = Literal["0.19", "0.12"]


class Starter:
    """Starts jobs of one test.

    Args:
        folder: for their files.
        server: where they are forked.
        text: dataset prefix.
        megatron: version.
    """

    def __init__(self, folder: Path, server: Callable[[], ForkServer], text: str, megatron: Version) -> None:
        self.folder = folder
        self.save = folder / "save"
        self._server = server
        self._text = text
        self._megatron = megatron
        self.jobs: list[Job] = []

    def start(
        self,
        name: str,
        inject: str = "",
        *,
        environ: Mapping[str, str] | None = None,
        options: Sequence[str] = ("--standalone",),
        really: bool = False,
        blanks: int | None = None,
        plugin: bool = True,
        **gpt: Any,
    ) -> Job:
        """Start a job that loads from and saves to `save`.

        name: of its folder.
        really: with the real ttprun and new interpreters.
        blanks: processes that the fork server keeps ready for the job; more than the ranks if it is restarted.
        gpt: for tiny_gpt_args.
        """
        places = {"save": str(self.save), "load": str(self.save)}
        arguments = tiny_gpt_args(**{"data_prefix": self._text, "megatron": self._megatron, **places, **gpt})
        spec = JobSpec(self.folder / name, arguments, inject, plugin, environ or {}, options)
        self.jobs.append(start_ttprun(spec) if really else self._server().start(spec, blanks))
        return self.jobs[-1]

    def run(self, name: str, inject: str = "", **named: Any) -> Job:
        """Start a job and wait for its end."""
        job = self.start(name, inject, **named)
        job.wait()
        return job

    def elsewhere(self, folder: Path) -> Starter:
        """The same for another folder."""
        return Starter(folder, self._server, self._text, self._megatron)

    @property
    def megatron(self) -> Version:
        """Version of Megatron."""
        return self._megatron

    def begin_from(self, save: Path) -> None:
        """Take over the checkpoints of another job."""
        shutil.copytree(save, self.save)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a small indexed dataset of real text."""
    prefix = tmp_path_factory.mktemp("text") / "text"
    command = [sys.executable, "-m", "mindio_tft_patch.launch.prepare_data", "--output", str(prefix)]
    subprocess.run([*command, "--max-bytes", "200000"], check=True, timeout=300, stdout=subprocess.DEVNULL)
    return str(prefix)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Version], ForkServer]]:
    """One fork server for each version, started when it is first asked for."""
    running: dict[Version, ForkServer] = {}

    def server(version: Version) -> ForkServer:
        if version not in running:
            path = [os.environ["MEGATRON_LM_PATH"]] if version == "0.12" else []
            running[version] = ForkServer(tmp_path_factory.mktemp("server") / "errors.txt", path)
        return running[version]

    yield server
    for one in running.values():
        one.close()


class UnbrokenRuns:
    """Runs without a fault, made when a test first asks for one.

    Args:
        new_folder: makes an empty folder.
    """

    def __init__(self, new_folder: Callable[[], Path]) -> None:
        self._new_folder = new_folder
        self._jobs: dict[tuple[Version, str], Job] = {}

    def of(self, starter: Starter, **gpt: Any) -> Job:
        """The one with these arguments, which are those of tiny_gpt_args."""
        key = (starter.megatron, json.dumps(gpt, sort_keys=True))
        if key not in self._jobs:
            self._jobs[key] = starter.elsewhere(self._new_folder()).run("unbroken", **gpt)
        job = self._jobs[key]
        assert job.code == 0, job.story()
        return job


@pytest.fixture(scope="session")
def unbroken_runs(tmp_path_factory: pytest.TempPathFactory) -> UnbrokenRuns:
    """Runs without a fault."""
    return UnbrokenRuns(lambda: tmp_path_factory.mktemp("unbroken"))


@pytest.fixture
def megatron(request: pytest.FixtureRequest) -> Version:
    """Version of Megatron; a test that runs with both parametrizes it indirectly."""
    version: Version = getattr(request, "param", "0.19")
    if version == "0.19" and importlib.util.find_spec("megatron.training") is None:
        pytest.skip("the installed megatron-core ships no megatron.training; install megatron-core>=0.17")
    if version == "0.12" and not os.environ.get("MEGATRON_LM_PATH"):
        pytest.skip("MEGATRON_LM_PATH names no Megatron-LM checkout (core_v0.12.1)")
    return version


@pytest.fixture
def starter(
    megatron: Version, servers: Callable[[Version], ForkServer], text: str, tmp_path: Path
) -> Iterator[Starter]:
    """Starts jobs; those that run on when the test ends are killed."""
    made = Starter(tmp_path, lambda: servers(megatron), text, megatron)
    yield made
    for job in made.jobs:
        if job.poll() is None:
            job.kill()
