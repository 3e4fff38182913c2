from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading

import pytest
from support.wire import client, controller, eventually, fast_config, free_port, ready

from mindio_tft_patch.processor.agent_client import AgentClient
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.handlers import Outcome
from mindio_tft_patch.protocol.endpoint import Endpoint, fetch, publish
from mindio_tft_patch.protocol.messages import CommitState
from mindio_tft_patch.protocol.phases import FaultKind, Phase, Strategy
from mindio_tft_patch.protocol.wire import PeerSocket
from mindio_tft_patch.testing import FakeStore


def obey_until_exit(peer: Client, told: list[Phase]) -> None:
    while True:
        do = peer.next_command(10.0)
        assert do is not None, "no command came"
        told.append(do.phase)
        detail = "/save/iter_0000007" if do.phase is Phase.DUMP else ""
        peer.done(do, CommitState(7), Outcome(detail, 5), 0.01)
        if do.phase is Phase.EXIT:
            return


@pytest.mark.parametrize("encrypted", [True, False])
def test_a_death_is_dumped_by_the_survivor_and_everybody_learns_the_path(
    encrypted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = fast_config(encrypted=encrypted)
    stopped = threading.Event()
    told: list[Phase] = []
    with caplog.at_level(logging.INFO), controller(config, 2) as (server, endpoint):
        agent = AgentClient(config, endpoint, node=0, ranks=(0, 1), world_size=2)
        agent.start()
        with client(config, endpoint, 0, 2, stopped.set) as survivor, client(config, endpoint, 1, 2) as victim:
            assert server.registered() == 2
            survivor.ready(ready(0, 2))
            victim.ready(ready(1, 2))
            eventually(lambda: "rank 1 is ready" in caplog.text)
            victim.close()
            agent.report(1, FaultKind.PROCESS_DEATH, "signal 9")
            obey_until_exit(survivor, told)
            verdict = server.verdict()
            assert verdict is not None
            assert (verdict.strategy, verdict.checkpoint, verdict.step) == (Strategy.DUMP, "/save/iter_0000007", 7)
            heard = agent.commands()
            eventually(lambda: heard.extend(agent.commands()) or heard[-1].phase is Phase.EXIT)
            assert heard[-1].plan.detail == "/save/iter_0000007"
            assert heard[0].plan.faulty == (1,)
        agent.close()
    assert stopped.is_set()
    assert told == [Phase.STOP, Phase.CLEAN, Phase.DUMP, Phase.EXIT]
    last = [one for one in caplog.records if one.name == "mindio_tft_patch.controller"][-1]
    fields: dict[str, object] = vars(last)["fields"]
    assert (fields["record"], fields["bytes_moved"]) == ("recovery", 15)
    assert last.message.startswith("recovery over: dump in ") and "{" not in last.message


def test_a_request_to_end_reaches_the_ranks() -> None:
    config = fast_config()
    with controller(config, 1) as (server, endpoint), client(config, endpoint, 0, 1) as only:
        only.ready(ready(0, 1))
        eventually(lambda: server._machine.roster.ranks[0].ready)
        server.terminate("SIGTERM")
        told: list[Phase] = []
        obey_until_exit(only, told)
        assert told[-1] is Phase.EXIT
        verdict = server.verdict()
        assert verdict is not None and "SIGTERM" in verdict.reason


def test_a_client_that_goes_quietly_on_stays_connected() -> None:
    config = fast_config()
    with controller(config, 1) as (_, endpoint), client(config, endpoint, 0, 1) as only:
        assert only.next_command(6.0) is None
        assert only.connected


def test_when_the_controller_is_gone_training_goes_on_and_the_rank_comes_back_to_a_new_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = fast_config(encrypted=False)
    with controller(config, 1) as (_, endpoint):
        only = Client(config, endpoint, _board(), rank=0, world_size=1, on_stop=lambda: None)
        only.start()
        only.ready(ready(0, 1))
    eventually(lambda: not only.connected)
    eventually(lambda: "unprotected" in caplog.text)
    with controller(config, 1) as (server, _):
        eventually(lambda: only.connected and server.registered() == 1)
        # What the new controller must know is sent again.
        eventually(lambda: server._machine.roster.ranks[0].ready is not None)
        only.close()
    assert caplog.text.count("unprotected") == 1


def _board():  # type: ignore[no-untyped-def]
    from mindio_tft_patch.processor.progress import ProgressBoard

    return ProgressBoard()


def test_the_endpoint_travels_through_the_store_and_no_key_is_shown() -> None:
    config = fast_config()
    store = FakeStore()
    with controller(config, 1) as (_, endpoint):
        publish(store, endpoint)
        assert fetch(store) == endpoint
        assert endpoint.client_secret is not None
        assert endpoint.client_secret.decode() not in repr(endpoint)


def test_no_key_is_ever_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = fast_config()
    with caplog.at_level(logging.DEBUG), controller(config, 1) as (_, endpoint), client(config, endpoint, 0, 1):
        pass
    for key in (endpoint.server_public, endpoint.client_public, endpoint.client_secret):
        assert key is not None and key.decode() not in caplog.text


def test_a_forked_child_ends_without_hanging_and_leaves_the_parent_connected() -> None:
    config = fast_config()
    with controller(config, 1) as (_, endpoint), client(config, endpoint, 0, 1) as only:
        child = os.fork()
        if child == 0:
            only.report(FaultKind.EXCEPTION, "must not be sent")
            only.close()
            os._exit(0)
        eventually(lambda: os.waitpid(child, os.WNOHANG)[0] == child)
        assert only.next_command(1.0) is None
        assert only.connected


def test_a_process_that_does_not_close_its_client_or_controller_still_ends() -> None:
    script = """
        from support.wire import fast_config
        from mindio_tft_patch.controller.server import ControllerServer
        from mindio_tft_patch.processor.client import Client
        from mindio_tft_patch.processor.progress import ProgressBoard
        config = fast_config()
        server = ControllerServer(config, 1)
        only = Client(config, server.start(), ProgressBoard(), rank=0, world_size=1, on_stop=lambda: None)
        only.start()
    """
    environ = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, env=environ, timeout=30, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_channel_that_was_left_open_does_not_stop_the_thread_in_which_the_collector_runs() -> None:
    left_open = PeerSocket(Endpoint("127.0.0.1", free_port()))
    # What the collector does with a context in a reference cycle: its weak references to sockets go first.
    left_open._context._sockets.clear()
    collector = threading.Thread(target=left_open._context.__del__, daemon=True)
    collector.start()
    collector.join(5)
    assert not collector.is_alive()
    left_open.close()
