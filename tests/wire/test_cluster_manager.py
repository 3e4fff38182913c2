"""A manager that follows a script, a real controller and ranks over ZeroMQ, through the SDK's functions."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.mini_rank import Gate, MiniRank
from support.wire import eventually, fast_config, free_port

from mindio_tft_patch.adaptors.sdk.controller import Face
from mindio_tft_patch.adaptors.sdk.manager import ACTIONS, FAULTS, RESULT, STOPPED, STRATEGIES
from mindio_tft_patch.config import Config
from mindio_tft_patch.controller.events import Choose, FaultyRanks, PauseTraining, SaveAndExit, StopTraining
from mindio_tft_patch.errors import ConfigError, ControlError
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.guard import EXIT_CODE
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.keys import external_endpoint, new_keys, write_keys

MEMORY_ERROR = RuntimeError("UCE ERROR")


class ScriptedManager:
    """Notes what it is told; the test says what it orders."""

    def __init__(self, face: Face) -> None:
        self.face = face
        self.told: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self.failing: set[str] = set()
        for action in ACTIONS:
            assert face.register(action, self._callback(action)) == 0

    def _callback(self, action: str) -> Callable[..., int]:
        def told(*arguments: Any) -> int:
            self.threads.add(threading.current_thread().name)
            self.told.append((action, *arguments))
            if action in self.failing:
                raise ConnectionError("the cluster cannot be reached")
            return 0

        return told

    def hears(self, action: str, count: int = 1) -> tuple[Any, ...]:
        """What it was told for the `count`th time."""
        eventually(lambda: sum(one[0] == action for one in self.told) >= count, 20)
        return [one[1:] for one in self.told if one[0] == action][count - 1]

    def stops(self, ranks: dict[int, int]) -> None:
        assert self.face.order("stop", StopTraining(ranks)) == 0

    def names(self, ranks: dict[int, int]) -> None:
        assert self.face.order("names", FaultyRanks(ranks, 1.0)) == 0

    def chooses(self, word: str) -> None:
        assert self.face.order("chooses", Choose(word)) == 0


class ManagedRanks:
    """A controller as TaskD starts it, a manager, and two ranks that train."""

    def __init__(self, environ: dict[str, str], config: Config) -> None:
        self.config = config
        self.face = Face(environ)
        self.gate = Gate(2)
        self.ranks: list[MiniRank] = []

    def start(self) -> ScriptedManager:
        self.face.init(-1, 2, False, True, False)
        self.manager = ScriptedManager(self.face)
        self.face.start("127.0.0.1", self.config.port, False, "")
        self.ranks += [self.rank(0).start(), self.rank(1).start()]
        eventually(lambda: min(rank.step for rank in self.ranks) > 2)
        return self.manager

    def rank(self, rank: int) -> MiniRank:
        return MiniRank(self.config, external_endpoint(self.config), rank, self.gate)

    def trains_on(self) -> None:
        """Both ranks complete further steps."""
        after = max(rank.step for rank in self.ranks)
        eventually(lambda: min(rank.step for rank in self.ranks) > after + 2)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.face.destroy()


@contextmanager
def managed(tmp_path: Path, *, encrypted: bool = True, **variables: str) -> Iterator[ManagedRanks]:
    port = free_port()
    environ = {
        "MINDX_TASK_ID": "task",
        "TFT_HEARTBEAT_SECONDS": "0.1",
        "TFT_HEARTBEATS_MISSED": "50",
        "TFT_COLLECT_SECONDS": "0.1",
        "TTP_OT": "20",
        "TTP_LOG_PATH": str(tmp_path / "logs"),
        **variables,
    }
    config = replace(fast_config(), port=port, high_availability=True, controller_external=True)
    if encrypted:
        write_keys(tmp_path / "keys.json", new_keys())
        environ["TFT_KEYS"] = str(tmp_path / "keys.json")
        config = replace(config, keys_path=tmp_path / "keys.json")
    job = ManagedRanks(environ, config)
    try:
        yield job
    finally:
        job.close()


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    yield
    from mindio_tft_patch import logs

    logs.reset()


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_memory_error_is_negotiated_and_retried(tmp_path: Path, encrypted: bool) -> None:
    with managed(tmp_path, encrypted=encrypted) as job:
        assert not job.face.registered
        manager = job.start()
        assert job.face.registered
        job.ranks[1].suffers(MEMORY_ERROR)
        assert manager.hears(FAULTS) == ({1: 0},)
        manager.stops({1: 0})
        code, text, ranks = manager.hears(STOPPED)
        assert (code, text, ranks) == (0, "all ranks have stopped", {1: 0})
        manager.names({1: 0})
        assert manager.hears(STRATEGIES) == ({1: 0}, ["retry", "recover", "dump", "exit"])
        manager.chooses("retry")
        code, _, ranks, word = manager.hears(RESULT)
        assert (code, ranks, word) == (0, {1: 0}, "retry")
        job.trains_on()
        assert manager.threads == {"mindio-tft-manager"}


def retries(manager: ScriptedManager, rank: int) -> None:
    """The manager has a memory error retried."""
    assert manager.hears(FAULTS) == ({rank: 0},)
    manager.stops({rank: 0})
    manager.hears(STOPPED)
    manager.names({rank: 0})
    manager.chooses("retry")
    assert manager.hears(RESULT)[0::3] == (0, "retry")


def test_a_lost_rank_is_started_anew_by_the_manager_and_taken_in(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        job.ranks[1].dies()
        manager.stops({1: 1})
        assert manager.hears(STOPPED)[0] == 0
        manager.names({1: 1})
        assert manager.hears(STRATEGIES) == ({1: 1}, ["recover", "dump", "exit"])
        manager.chooses("recover")
        eventually(lambda: "clean" in job.ranks[0].handlers.called)
        job.ranks[1] = job.rank(1).start()
        assert job.ranks[1].client.returning
        assert manager.hears(RESULT)[0::3] == (0, "recover")
        job.trains_on()


def test_a_retry_that_fails_leads_to_a_dump(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        job.ranks[0].handlers.failing = frozenset({_phase("rebuild")})
        job.ranks[1].suffers(MEMORY_ERROR)
        manager.hears(FAULTS)
        manager.stops({})
        manager.hears(STOPPED)
        manager.names({1: 0})
        manager.chooses("retry")
        code, text, _, word = manager.hears(RESULT)
        assert (code, word) == (405, "retry") and "rebuild failed on rank 0" in text
        manager.chooses("dump")
        assert manager.hears(RESULT, 2)[0::3] == (0, "dump")
        eventually(lambda: all(rank.code == EXIT_CODE for rank in job.ranks))


def _phase(name: str) -> Any:
    from mindio_tft_patch.protocol.phases import Phase

    return Phase(name)


def test_all_ranks_hold_at_one_step_and_go_on(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        for count in (1, 2, 3):
            assert job.face.order("pause", PauseTraining(30.0)) == 0
            code, text, ranks = manager.hears(STOPPED, count)
            assert (code, ranks) == (0, {})
            assert {f"all ranks hold after step {rank.step}" for rank in job.ranks} == {text}
            manager.chooses("continue")
            assert manager.hears(RESULT, count)[0::3] == (0, "continue")
            job.trains_on()
        assert job.ranks[0].handlers.called == ["pause"] * 3


def test_a_fault_and_a_stop_get_through_to_ranks_that_hold(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        assert job.face.order("pause", PauseTraining(30.0)) == 0
        manager.hears(STOPPED)
        manager.stops({1: 0})
        assert manager.hears(STOPPED, 2)[0] == 0
        manager.names({1: 0})
        manager.chooses("retry")
        assert manager.hears(RESULT)[0::3] == (0, "retry")
        job.trains_on()


def test_save_and_exit_writes_a_checkpoint(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        assert job.face.order("dump", SaveAndExit()) == 0
        assert manager.hears(RESULT)[0::3] == (0, "dump")
        eventually(lambda: all(rank.code == EXIT_CODE for rank in job.ranks))
        assert all(rank.handlers.called[-1] == "dump" for rank in job.ranks)
        assert job.face.order("dump", SaveAndExit()) == 1


def test_a_callback_that_raises_leaves_the_decision_to_the_controller(tmp_path: Path) -> None:
    with managed(tmp_path, MINDIO_WAIT_MINDX_TIME="3600") as job:
        manager = job.start()
        manager.failing = {FAULTS}
        job.ranks[1].suffers(MEMORY_ERROR)
        assert manager.hears(RESULT)[0::3] == (0, "retry")
        job.trains_on()


def test_a_manager_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with managed(tmp_path, MINDIO_WAIT_MINDX_TIME="1") as job:
        manager = job.start()
        job.ranks[1].suffers(MEMORY_ERROR)
        assert manager.hears(RESULT)[0::3] == (0, "retry")
        assert [one[0] for one in manager.told] == [FAULTS, RESULT]


def test_without_all_four_callbacks_no_manager_takes_part(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        alone = Face({"TTP_LOG_PATH": str(tmp_path), "TFT_KEYS": str(tmp_path / "keys.json")})
        alone.init(-1, 2, False, False, False)
        for action in ACTIONS[:3]:
            alone.register(action, print)
        alone.start("127.0.0.1", free_port(), False, "")
        assert alone.order("stop", StopTraining({0: 1})) == 1
        alone.register(ACTIONS[3], print)
        assert alone.order("stop", StopTraining({0: 1})) == 0
        alone.destroy()
        assert manager.told == []


def test_a_controller_that_is_started_again_finds_its_ranks(tmp_path: Path) -> None:
    with managed(tmp_path) as job:
        manager = job.start()
        job.ranks[0].suffers(MEMORY_ERROR)
        retries(manager, 0)
        job.face.destroy()
        job.face.init(-1, 2, False, True, False)
        again = ScriptedManager(job.face)
        job.face.start("127.0.0.1", job.config.port, False, "")
        eventually(lambda: job.face.registered, 20)
        eventually(lambda: job.face._server._machine.roster.ranks[1].ready, 20)  # type: ignore[union-attr]
        job.ranks[1].suffers(MEMORY_ERROR)
        retries(again, 1)  # ranks obey it, although it has counted fewer recoveries than they have seen
        job.trains_on()


def test_a_rank_with_other_keys_or_none_is_not_let_in(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with managed(tmp_path) as job:
        job.start()
        write_keys(tmp_path / "other.json", new_keys())
        for keys in (tmp_path / "other.json", None):
            stranger = replace(job.config, keys_path=keys, retry_times=2)
            peer = Client(
                stranger, external_endpoint(stranger), ProgressBoard(), rank=1, world_size=2, on_stop=lambda: None
            )
            with pytest.raises(ControlError, match="No answer from the controller"):
                peer.start()
        job.trains_on()


def test_a_channel_without_keys_is_warned_of_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), managed(tmp_path, encrypted=False) as job:
        external_endpoint(job.config)
        assert "NOT ENCRYPTED" in caplog.text and "TFT_KEYS" in caplog.text


def test_tls_is_refused_where_there_are_no_keys(tmp_path: Path) -> None:
    with managed(tmp_path, encrypted=False) as job:
        job.face.init(-1, 2, False, True, False)
        with pytest.raises(ConfigError, match="TFT_KEYS"):
            job.face.start("127.0.0.1", job.config.port, True, "")
