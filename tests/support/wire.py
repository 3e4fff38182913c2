"""A controller and peers over real ZeroMQ on loopback."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mindio_tft_patch.config import Config
from mindio_tft_patch.controller.server import ControllerServer
from mindio_tft_patch.processor.client import Client
from mindio_tft_patch.processor.progress import ProgressBoard
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.messages import Ready, ReplicaSet
from mindio_tft_patch.protocol.phases import Strategy


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fast_config(**changes: object) -> Config:
    """Short intervals on a free port; but a machine at work may stop any thread for a while, which is no fault."""
    base = Config(
        port=free_port(),
        heartbeat_seconds=0.1,
        heartbeats_missed=50,
        collect_seconds=0.1,
        retry_times=5,
        dump_timeout_seconds=20.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until a condition holds.

    Raises:
        AssertionError: it did not in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def controller(config: Config, world_size: int) -> Iterator[tuple[ControllerServer, Endpoint]]:
    server = ControllerServer(config, world_size)
    try:
        yield server, server.start()
    finally:
        server.close()


@contextmanager
def client(
    config: Config, endpoint: Endpoint, rank: int, world_size: int, on_stop: Callable[[], None] = lambda: None
) -> Iterator[Client]:
    made = Client(config, endpoint, ProgressBoard(), rank=rank, world_size=world_size, on_stop=on_stop)
    try:
        made.start()
        yield made
    finally:
        made.close()


def ready(rank: int, world_size: int, strategies: tuple[Strategy, ...] = (Strategy.DUMP,)) -> Ready:
    return Ready(rank, 0, (ReplicaSet("dense", tuple(range(world_size))),), strategies)
