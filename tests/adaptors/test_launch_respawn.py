"""Replacing one process below torchelastic's records, and what becomes of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from mindio_tft_patch.errors import UnsupportedError
from mindio_tft_patch.launch.job_store import agree_on_job_store, current_attempt
from mindio_tft_patch.launch.processes import LocalProcesses
from mindio_tft_patch.launch.respawn import Respawner, RespawnError, missing_in_torch
from mindio_tft_patch.launch.ttprun import check_torch_in_place

SCRIPT = "import os, time; print('life', flush=True); open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('old'); {}"


class Node:
    """Two ranks as torchelastic starts them, and what replaces them."""

    def __init__(self, folder: Path, script: str = "time.sleep(60)") -> None:
        arguments = ("-u", "-c", SCRIPT.format(script))
        self.context = SubprocessContext(
            name="toy",
            entrypoint=sys.executable,
            args={0: arguments, 1: arguments},
            envs={0: {"RANK": "4"}, 1: {"RANK": "5"}},
            logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        )
        self.context._start()
        self.workers = {4 + local: SimpleNamespace(local_rank=local, id=0) for local in (0, 1)}
        self.processes = LocalProcesses({4 + local: pid for local, pid in self.context.pids().items()})
        self.respawner = Respawner(self.context, self.workers, self.processes, None)

    def log(self, local_rank: int) -> str:
        return Path(self.context.stdouts[local_rank]).read_text()

    def wait_for_lives(self, local_rank: int, count: int) -> None:
        deadline = time.monotonic() + 30.0
        while self.log(local_rank).count("life") < count or not self.error_file(local_rank).exists():
            assert time.monotonic() < deadline, self.log(local_rank)
            time.sleep(0.02)

    def error_file(self, local_rank: int) -> Path:
        return Path(self.context.error_files[local_rank])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.processes.close()
    made.context.close(signal.SIGKILL)


def test_the_new_process_is_in_all_records_and_its_output_behind_that_of_the_old_one(node: Node) -> None:
    node.wait_for_lives(1, 1)
    old = node.context.pids()
    node.respawner.restart(5)
    new = node.context.pids()
    assert new[0] == old[0] and new[1] != old[1]
    assert node.workers[5].id == node.processes.pids[5] == new[1]
    assert os.getpgid(new[1]) == new[1]
    with pytest.raises(ProcessLookupError):
        os.kill(old[1], 0)
    node.wait_for_lives(1, 2)
    assert node.context.wait(0) is None, "torchelastic sees two ranks that run"


def test_what_the_old_process_said_of_its_end_is_put_aside(node: Node) -> None:
    node.wait_for_lives(1, 1)
    old = node.context.pids()[1]
    node.respawner.restart(5)
    aside = node.error_file(1).with_name(f"error.json.{old}")
    assert aside.read_text() == "old"


def test_a_rank_that_cannot_be_started_is_an_error_and_can_be_tried_again(node: Node) -> None:
    node.wait_for_lives(0, 1)
    entrypoint, node.context.entrypoint = node.context.entrypoint, "/no/such/python"
    with pytest.raises(RespawnError, match=r"Rank 4 cannot be started again: .*no/such/python"):
        node.respawner.restart(4)
    assert 4 not in node.processes.pids, "its number may belong to somebody else by now"
    node.context.entrypoint = entrypoint
    node.respawner.restart(4)
    node.wait_for_lives(0, 2)


def test_this_torch_has_all_that_a_restart_of_one_rank_needs() -> None:
    assert missing_in_torch() == []


def test_a_torch_whose_records_have_moved_is_refused_with_the_way_out() -> None:
    class Handler:
        def __init__(self, entrypoint: str, args: tuple[str, ...]) -> None: ...

    class Context(SubprocessContext):  # type: ignore[misc]
        def __init__(self) -> None:
            self.handlers = {}

    missing = missing_in_torch(Handler, Context, PContext)
    assert "SubprocessHandler._popen(args, env)" in missing
    assert "SubprocessContext.subprocess_handlers" in missing
    with pytest.raises(UnsupportedError, match=r"torch 9\.9.*subprocess_handlers.*remove --enable-hbmfault-repair"):
        check_torch_in_place(missing, "9.9")
    assert SubprocessHandler is not Handler


def test_a_launcher_that_comes_into_a_running_job_learns_which_attempt_it_is_in() -> None:
    store = HashStore()
    assert current_attempt(store) == 0
    for attempt in (0, 1):
        agree_on_job_store(store, leads=True, attempt=attempt, first=True, address="127.0.0.1", port=1)
    assert current_attempt(store) == 1
