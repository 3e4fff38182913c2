"""Interruptible collectives, with two real gloo ranks of which one never comes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import os, sys, threading, time, datetime
    import torch, torch.distributed as dist
    from mindio_tft_patch.adaptors.device.gloo import GlooDevice
    from mindio_tft_patch.errors import Interrupted
    from mindio_tft_patch.processor.progress import ProgressBoard

    rank, path, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
    board = ProgressBoard()
    device = GlooDevice(board)
    device.install()
    value = torch.ones(2)
    dist.all_reduce(value)
    assert value.tolist() == [2.0, 2.0]
    if rank == 0:
        value = torch.full((2,), 5.0)
        dist.send(value, 1)
        dist.recv(value, 1)
        assert value.tolist() == [7.0, 7.0]
    else:
        dist.recv(value, 0)
        assert value.tolist() == [5.0, 5.0]
        dist.send(torch.full((2,), 7.0), 0)
    dist.barrier()
    if rank == 1:
        sys.stdin.read()  # never comes to the collective; ends when its input is closed
        os._exit(0)
    waiting = []
    def stop():
        time.sleep(0.5)
        waiting.append(board.snapshot().in_collective_seconds)
        device.stop()
    threading.Thread(target=stop).start()
    began = time.monotonic()
    try:
        if kind == "collective":
            dist.all_reduce(value)
        elif kind == "barrier":
            dist.barrier()
        else:
            dist.recv(value, 1)
    except Interrupted:
        print("interrupted", 0.4 < time.monotonic() - began < 5.0, waiting[0] > 0.2, flush=True)
    try:
        dist.all_reduce(value)
    except Interrupted:
        print("still stopped", flush=True)
    print("outside", board.snapshot().in_collective_seconds, flush=True)
    os._exit(0)
    """
)


@pytest.mark.parametrize("kind", ["collective", "barrier", "receive"])
def test_a_blocked_wait_ends_when_the_controller_stops_training(tmp_path, kind: str) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    store = str(tmp_path / "store")
    absent = subprocess.Popen([*command, "1", store, kind], stdin=subprocess.PIPE)
    try:
        done = subprocess.run([*command, "0", store, kind], check=False, capture_output=True, text=True, timeout=120)
    finally:
        assert absent.stdin is not None
        absent.stdin.close()
        absent.wait(timeout=60)
    assert done.stdout.splitlines() == ["interrupted True True", "still stopped", "outside None"], done.stderr
