"""Issue line G: whatever knocks at the port, the message is clear and the job that runs is unharmed."""

from __future__ import annotations

import logging
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq
from support.control import register
from support.wire import client, controller, eventually, fast_config, free_port

from mindio_tft_patch.config import Config
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.errors import ControlError
from mindio_tft_patch.protocol import wire
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Finished, Heartbeat, Register, Role
from mindio_tft_patch.protocol.wire import PeerSocket, descriptor_shortage


@contextmanager
def running_job(config: Config, world_size: int = 2) -> Iterator[tuple[ControllerServer, Endpoint]]:
    """A job of which rank 0 is connected; at the end it must still be, and its heartbeats must arrive."""
    with controller(config, world_size) as (server, endpoint), client(config, endpoint, 0, world_size) as rank_0:
        yield server, endpoint
        asked = time.monotonic()
        eventually(lambda: (server._machine.roster.ranks[0].heard_at or 0.0) > asked)
        assert rank_0.connected
        assert server.registered() == 1
        assert server.verdict() is None


def test_a_port_that_another_job_uses_is_refused_with_what_to_change() -> None:
    config = fast_config()
    with running_job(config), pytest.raises(ControlError, match=rf"port {config.port} .*another job.*TTP_PORT"):
        ControllerServer(config, 2).start()


def test_a_port_that_a_foreign_program_uses_is_refused_with_what_to_change() -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        with pytest.raises(ControlError, match="TTP_PORT"):
            ControllerServer(fast_config(port=foreign.getsockname()[1]), 2).start()


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    with pytest.raises(ControlError, match="CONTROLLER_ADDR"):
        ControllerServer(fast_config(controller_bind="192.0.2.1"), 2).start()


def test_a_name_that_does_not_resolve_is_refused() -> None:
    config = fast_config(controller_bind="no-such-host.invalid")
    with pytest.raises(ControlError, match=r"'no-such-host.invalid' cannot be resolved.*CONTROLLER_ADDR"):
        ControllerServer(config, 2).start()
    with (
        pytest.raises(ControlError, match="cannot be resolved"),
        client(config, Endpoint("no-such-host.invalid", config.port), 0, 2),
    ):
        pass


def test_an_unreachable_controller_is_said_with_what_to_check() -> None:
    config = fast_config(retry_times=1)
    with (
        pytest.raises(ControlError, match=r"1 tries \(no connection.*TTP_ADDR.*PROCESSOR_ADDR.*TTP_PORT.*TTP_TLS"),
        client(config, Endpoint("127.0.0.1", free_port()), 0, 2),
    ):
        pass


def test_a_foreign_program_in_place_of_the_controller_is_noticed() -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        endpoint = Endpoint("127.0.0.1", foreign.getsockname()[1])
        with (
            pytest.raises(ControlError, match="did not complete the handshake"),
            client(fast_config(retry_times=1), endpoint, 0, 2),
        ):
            pass


@pytest.mark.parametrize("who", ["other job", "no keys", "keys where none are wanted"])
def test_a_peer_with_wrong_keys_gets_nothing(who: str, caplog: pytest.LogCaptureFixture) -> None:
    config = fast_config(encrypted=who != "keys where none are wanted")
    with running_job(config) as (_, endpoint):
        with controller(fast_config(), 1) as (_, elsewhere):
            keys = {
                "other job": replace(elsewhere, port=config.port),
                # The right key of the controller does not help without an allowed key of one's own.
                "no keys": Endpoint("127.0.0.1", config.port),
                "keys where none are wanted": replace(elsewhere, port=config.port),
            }[who]
        with (
            pytest.raises(ControlError, match="TTP_TLS"),
            client(replace(config, retry_times=1), keys, 1, 2),
        ):
            pass
    assert endpoint.port == config.port


def test_a_peer_that_knows_the_controllers_key_but_has_none_of_this_job_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = fast_config()
    public, secret = zmq.curve_keypair()
    with running_job(config) as (_, endpoint):
        stranger = replace(endpoint, client_public=public, client_secret=secret)
        with pytest.raises(ControlError, match="keys"), client(replace(config, retry_times=2), stranger, 1, 2):
            pass
        eventually(lambda: "its key is not one of this job" in caplog.text)


def test_garbage_on_the_port_is_dropped() -> None:
    config = fast_config()
    with running_job(config):
        for garbage in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x00" * 4096,
            os.urandom(100_000),
            b"\xff" + b"\x00" * 8 + b"\x7f",
        ):
            with socket.create_connection(("127.0.0.1", config.port)) as knock:
                try:
                    knock.sendall(garbage)
                    knock.settimeout(0.3)
                    knock.recv(1000)
                except OSError:
                    continue


def test_garbage_from_a_peer_with_the_right_keys_is_dropped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = fast_config()
    with running_job(config) as (_, endpoint):
        peer = PeerSocket(endpoint)
        for frames in ([b"garbage"], [b""], [b"a", b"b", b"c"], [msgspec.msgpack.encode({"type": "ready"})]):
            peer._socket.send_multipart(frames)
        eventually(lambda: "that is no message" in caplog.text and "3 frames" not in caplog.text)
        eventually(lambda: "a peer sends exactly one" in caplog.text)
        peer.close()


def test_an_oversize_message_costs_its_sender_the_connection_only() -> None:
    config = fast_config()
    with running_job(config) as (_, endpoint):
        peer = PeerSocket(endpoint)
        peer._socket.send(b"x" * (wire.UP_BYTES_MAX + 1))
        peer.receive(0.5)
        peer.close()


def _answers(endpoint: Endpoint, *messages: object, until: Callable[[], bool] = lambda: False) -> list[object]:
    """What a peer hears that says this: the first answer, or what has come a while after `until`."""
    peer = PeerSocket(endpoint)
    for message in messages:
        peer.send(message)  # type: ignore[arg-type]
    answers: list[object] = []
    eventually(lambda: answers.extend(peer.receive(0.1)) or answers or until())
    answers += peer.receive(0.5)
    peer.close()
    return answers


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (msgspec.structs.replace(register(1, 2), version=1), "version 1"),
        (register(7, 2), "rank 7 is not from 0 to 1"),
        (msgspec.structs.replace(register(1, 2), rank=-1), "rank -1 is not"),
        (register(1, 8), "its job has 8 ranks"),
        (register(0, 2), "is registered and alive"),
        (Register(Role.AGENT, -1, 2, 1, "a", 0, (0, 5)), "rank 5 is not"),
    ],
)
def test_a_peer_that_introduces_itself_wrongly_is_refused_with_the_reason(
    wrong: Register, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running_job(fast_config()) as (_, endpoint):
        answers = _answers(endpoint, wrong)
        assert [one.accepted for one in answers] == [False]  # type: ignore[attr-defined]
        assert why in answers[0].reason  # type: ignore[attr-defined]
        assert why in caplog.text


def test_a_client_that_is_refused_says_why_and_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    config = fast_config()
    asked: list[object] = []
    send = PeerSocket.send
    with running_job(config) as (_, endpoint):
        hosts = replace(config, retry_times=30)
        monkeypatch.setattr(PeerSocket, "send", lambda peer, message: asked.append(message) or send(peer, message))
        with pytest.raises(ControlError, match="its job has 3 ranks"), client(hosts, endpoint, 1, 3):
            pass
    assert sum(isinstance(one, Register) and one.world_size == 3 for one in asked) == 1


def test_a_peer_that_has_not_registered_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(fast_config()) as (server, endpoint):
        assert _answers(endpoint, Finished(0), until=lambda: "has not registered" in caplog.text) == []
        assert not server._machine.roster.ranks[0].finished


def test_a_peer_may_speak_for_its_own_rank_only(caplog: pytest.LogCaptureFixture) -> None:
    config = fast_config()
    with controller(config, 2) as (server, endpoint), client(config, endpoint, 0, 2):
        _answers(endpoint, register(1, 2), Finished(0), Finished(9))
        eventually(lambda: "Dropped a Finished about rank 0 of processor 1" in caplog.text)
        assert not server._machine.roster.ranks[0].finished


def test_complaints_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    with running_job(fast_config()) as (_, endpoint):
        _answers(endpoint, *[Finished(0)] * 200, until=lambda: "has not registered" in caplog.text)
    assert caplog.text.count("has not registered") == 1


def test_a_thousand_connections_that_say_nothing_disturb_nobody() -> None:
    config = fast_config()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 4096) if hard != resource.RLIM_INFINITY else 4096
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with running_job(config) as (server, endpoint), ExitStack() as silent:
            for _ in range(1000):
                silent.enter_context(socket.create_connection(("127.0.0.1", config.port), timeout=5))
            heard = server._machine.roster.ranks[0].heard_at or 0.0
            eventually(lambda: (server._machine.roster.ranks[0].heard_at or 0.0) > heard + 0.5)
            # And a rank that comes late still gets in.
            with client(config, endpoint, 1, 2) as late:
                assert late.connected
            server._identities.pop(next(peer for peer in server._identities if peer.index == 1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_few_file_descriptors_are_said_before_the_start(caplog: pytest.LogCaptureFixture) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert descriptor_shortage(2) is None
    message = descriptor_shortage(10**7) if soft != resource.RLIM_INFINITY else "ulimit -n"
    assert message is not None and "ulimit -n" in message


def test_an_unencrypted_channel_off_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    server = ControllerServer(fast_config(encrypted=False, controller_bind="0.0.0.0"), 1)
    server.start()
    server.close()
    assert "TTP_TLS=0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING), controller(fast_config(encrypted=False), 1):
        pass
    assert "TTP_TLS" not in caplog.text


@pytest.mark.parametrize("address", ["::1", "localhost"])
def test_ipv6_and_names_work(address: str) -> None:
    if address == "::1" and not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    config = fast_config(controller_bind=address, controller_address=address)
    with controller(config, 1) as (server, endpoint), client(config, endpoint, 0, 1):
        assert server.registered() == 1


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_heartbeat_for_a_rank_out_of_range_does_not_reach_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    from support.control import progress

    config = fast_config()
    with running_job(config) as (_, endpoint):
        beat = Heartbeat(10**9, progress(1))
        assert _answers(endpoint, beat, until=lambda: "has not registered" in caplog.text) == []
