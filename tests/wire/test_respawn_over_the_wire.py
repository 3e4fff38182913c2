"""A rank is lost, a second client registers in its place, and both guards go on training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.wire import client, controller, eventually, fast_config, ready

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError, Interrupted
from mindio_tft_patch.processor.agent_client import AgentClient
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.guard import EXIT_CODE, Guard
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import CommitState
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy
from mindio_tft_patch.testing import FakeHandlers

OFFERED = (Strategy.RETRY, Strategy.RESPAWN, Strategy.RELOAD, Strategy.DUMP)


class Rank:
    """A client, a guard around a body that trains until it is stopped, and the thread they run on."""

    def __init__(self, config: Config, endpoint: Endpoint, rank: int, commit: CommitState) -> None:
        self.stopped = threading.Event()
        self.handlers = FakeHandlers(commit=commit, offered=OFFERED)
        self.client = Client(
            config, endpoint, ProgressBoard(), rank=rank, world_size=2, on_stop=self.stopped.set, node=0
        )
        self.rank = rank
        self.entered = 0
        self.ended = threading.Event()
        self.code: object = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> Rank:
        self.client.start()
        self.client.ready(ready(self.rank, 2, OFFERED))
        self.thread.start()
        return self

    def _run(self) -> None:
        guard = Guard(self.client, self.handlers, self.client._board, patience_seconds=5)
        try:
            guard.run(self._train, returning=self.client.returning)
        except SystemExit as leaving:
            self.code = leaving.code
        except Interrupted:  # its client was closed meanwhile
            self.code = None

    def _train(self) -> None:
        self.entered += 1
        while not self.ended.wait(0.01):
            if self.stopped.is_set():
                self.stopped.clear()
                raise Interrupted

    def dies(self) -> None:
        self.client._stopping = True
        self.client.close()


@contextmanager
def job(
    caplog: pytest.LogCaptureFixture, **changes: object
) -> Iterator[tuple[Config, Endpoint, AgentClient, list[Rank]]]:
    config = fast_config(**changes)
    with caplog.at_level(logging.INFO), controller(config, 2) as (_, endpoint):
        agent = AgentClient(config, endpoint, node=0, ranks=(0, 1), world_size=2)
        agent.start()
        ranks = [Rank(config, endpoint, rank, CommitState(7)).start() for rank in range(2)]
        eventually(lambda: caplog.text.count("is ready") == 2)
        yield config, endpoint, agent, ranks
        for one in ranks:
            one.ended.set()
            one.client.close()
        agent.close()


def heard(agent: AgentClient, phase: Phase) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    eventually(lambda: found.extend(do.plan.lost for do in agent.commands() if do.phase is phase) or found)
    return found


def test_a_second_client_takes_the_place_of_a_lost_one(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog) as (config, endpoint, agent, ranks):
        ranks[1].dies()
        agent.report(1, FaultKind.PROCESS_DEATH, "signal 9")
        assert heard(agent, Phase.STOP) == [(1,)]
        eventually(lambda: "waiting for rank 1 to come back" in caplog.text)
        ranks.append(Rank(config, endpoint, 1, CommitState(0)).start())
        assert ranks[2].client.returning and not ranks[0].client.returning
        eventually(lambda: ranks[0].entered == 2 and ranks[2].entered == 1)
        assert ranks[2].handlers.called == ["rebuild", "repair", "rollback", "resume"]
        assert ranks[0].handlers.called == ["arrived", "clean", "rebuild", "repair", "rollback", "resume"]
        assert ranks[2].handlers.commit == CommitState(7)
        eventually(lambda: "recovery over: respawn" in caplog.text)
        record = next(vars(one)["fields"] for one in caplog.records if one.message.startswith("recovery over"))
        assert (record["strategy"], record["restarted"], record["step"]) == ("respawn", [1], 7)


def test_a_returned_rank_whose_job_ends_leaves_with_the_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    with job(caplog) as (config, endpoint, agent, ranks):
        ranks[1].dies()
        agent.report(1, FaultKind.PROCESS_DEATH, "signal 9")
        eventually(lambda: "waiting for rank 1 to come back" in caplog.text)
        ranks[0].handlers.failing = frozenset({Phase.REBUILD})
        ranks.append(Rank(config, endpoint, 1, CommitState(0)).start())
        ranks[2].thread.join(10)
        assert (ranks[2].code, ranks[2].entered) == (EXIT_CODE, 0)
        assert Phase.DUMP.value in ranks[0].handlers.called


def test_a_process_that_is_started_a_moment_too_early_gets_in_when_the_old_one_is_silent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with job(caplog, heartbeats_missed=15) as (config, endpoint, _, ranks):
        ranks[1].dies()
        ranks.append(Rank(config, endpoint, 1, CommitState(0)).start())
        assert "refuses this peer for now: rank 1 is registered and alive" in caplog.text
        assert ranks[2].client.returning
        eventually(lambda: ranks[0].entered == 2 and ranks[2].entered == 1)


def test_a_second_process_of_a_rank_that_lives_on_is_refused_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with (
        job(caplog, retry_times=2) as (config, endpoint, _, ranks),
        pytest.raises(ControlError, match="rank 1 is registered and alive"),
        client(config, endpoint, 1, 2),
    ):
        pass
    assert ranks[1].entered == 1
