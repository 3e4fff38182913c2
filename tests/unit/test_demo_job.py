"""The jobs of the demonstration: the port of their controller, and what stays for a repetition."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from mindio_tft_patch.launch import demo, demo_job
from mindio_tft_patch.launch.demo_job import Job

# As ttprun: says why it ends when the port is not free, and prints a step otherwise.
_LAUNCHER = """
import os, pathlib, socket, sys
port, tries = os.environ["TTP_PORT"], pathlib.Path("tries")
with tries.open("a") as stream:
    stream.write(port + chr(10))
if len(tries.read_text().split()) <= TAKEN:
    sys.exit(f"ttprun: The controller cannot use port {port} on 127.0.0.1: another program uses it.")
print("iteration 1/ 1 | elapsed time per iteration (ms): 1.0 | lm loss: 1.0 |")
"""


def watched(folder: Path, monkeypatch: pytest.MonkeyPatch, taken: int) -> Job:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        demo_job, "command", lambda *_, **__: [sys.executable, "-c", _LAUNCHER.replace("TAKEN", str(taken))]
    )
    job = Job(folder / "job", checkpoints=folder / "c", data=folder / "d", steps=1)
    job.start()
    job.watch(lambda seen: None)
    return job


def test_a_port_that_somebody_took_meanwhile_is_replaced_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter(range(20001, 20004))
    monkeypatch.setattr(demo_job, "_free_port", lambda: next(free))
    job = watched(tmp_path, monkeypatch, taken=2)
    assert job.code == 0 and list(job.steps_seen) == [1]
    assert len(set((tmp_path / "tries").read_text().split())) == 3


def test_a_machine_without_a_free_port_ends_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = watched(tmp_path, monkeypatch, taken=1000)
    assert job.code == 1 and "cannot use port" in job.last_words()


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    free = demo_job._free_port()  # the system gives it to nobody
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        monkeypatch.setattr(demo_job, "_PORTS", [holder.getsockname()[1], free])
        assert {demo_job._free_port() for _ in range(8)} == {free}


def test_what_the_repetition_needs_stays(tmp_path: Path) -> None:
    for name in ("data", "in_place", "unbroken"):
        (tmp_path / name).mkdir()
    demo._leave_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
