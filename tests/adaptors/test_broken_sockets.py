"""Connections that break on purpose: gloo notices on every rank, the job's store does not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mindio_tft_patch.adaptors.injection.sockets import break_connections

RANKS = 3
SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from mindio_tft_patch.adaptors.injection.sockets import break_connections

rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timedelta(seconds=30))
dist.init_process_group("gloo", rank=rank, world_size=3, store=store, timeout=timedelta(seconds=30))
dist.all_reduce(torch.ones(4))
if rank == 1:
    print("broken", break_connections({port}), flush=True)
    if sys.argv[3] == "stays away":
        store.get("all have noticed")
        os._exit(0)
began = time.monotonic()
try:
    for _ in range(100):
        dist.all_reduce(torch.ones(4))
        time.sleep(0.05)
    print("nothing happened")
except RuntimeError as error:
    print("noticed", "Connection closed by peer" in str(error) or "reset" in str(error), time.monotonic() - began < 10)
print("store", store.add("noticed", 1) > 0, flush=True)
if rank == 0:
    while store.add("noticed", 0) < (2 if sys.argv[3] == "stays away" else 3):
        time.sleep(0.02)
    store.set("all have noticed", "1")
    time.sleep(0.5)
else:
    store.get("all have noticed")
os._exit(0)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("what", ["goes on", "stays away"])
def test_every_rank_of_a_group_notices_and_the_store_works_on(what: str, tmp_path: Path) -> None:
    script, port = tmp_path / "rank.py", str(free_port())
    script.write_text(SCRIPT)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, what], stdout=subprocess.PIPE, env=environ, text=True
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=90)[0].split("\n") for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert int(said[1][0].removeprefix("broken ")) >= RANKS - 1
    for rank in (0, 2) if what == "stays away" else (0, 2, 1):
        assert said[rank][-3:-1] == ["noticed True True", "store True"], f"rank {rank}: {said[rank]}"


def test_listening_sockets_and_spared_ports_are_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as peer:
            break_connections({port})
            client.sendall(b"a")
            assert peer.recv(1) == b"a"
            assert break_connections(()) >= 2
            assert peer.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            pass
