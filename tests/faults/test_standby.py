"""A stand-by that becomes a program is that program: what scripts, multiprocessing and the plugin can see of it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mindio_tft_patch.launch.reserve import Order, Standby, standby_command, start_standby

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import json, multiprocessing, os, sys, threading
from dataclasses import dataclass

import mindio_tft_patch
import neighbour

@dataclass
class Mine:
    number: int

def child(queue):
    queue.put((Mine(7), os.environ["RANK"], __name__))

if __name__ == "__main__":
    threads = len(os.listdir("/proc/self/task"))
    descriptors = sorted(int(number) for number in os.listdir("/proc/self/fd"))[:-1]
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    thing, rank, name = queue.get()
    process.join()
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "child": [type(thing) is Mine, rank, name],
        "rank": os.environ["RANK"], "left": [v for v in os.environ if v.startswith(("TFT_", "PYTORCH_NVML"))],
        "leads": os.getpgid(0) == os.getsid(0) == os.getpid(), "threads": threads, "cwd": os.getcwd(),
        "patched": mindio_tft_patch.installation() is not None,
        "descriptors": descriptors,
    }))
    sys.stderr.write("the end\\n")
    sys.exit(7)
"""


class Bench:
    """A folder with a script, and a stand-by for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.standby: Standby | None = None
        (folder / "train.py").write_text(SCRIPT)
        (folder / "neighbour.py").write_text("")

    def start(self, *words: str) -> Standby:
        self.words = words
        command = standby_command(sys.executable, ["-u", *words])
        assert command is not None
        self.standby = start_standby(command, {**os.environ, "RANK": "0", "OMP_NUM_THREADS": "1"})
        return self.standby

    def ready(self) -> Standby:
        assert self.standby is not None
        deadline = time.monotonic() + 90.0
        while not self.standby.ready:
            assert self.standby.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        return self.standby

    def order(self) -> Order:
        command = (sys.executable, "-u", *self.words)
        environ = {**os.environ, "RANK": "3", "OMP_NUM_THREADS": "1"}
        logs = (str(self.folder / "stdout.log"), str(self.folder / "stderr.log"))
        return Order(command, command, environ, *logs)

    def obeys(self) -> dict[str, object]:
        standby, order = self.ready(), self.order().encoded()
        assert order is not None and standby.accept(order)
        assert standby.process.wait(60.0) == 7, (self.folder / "stderr.log").read_text()
        return dict(json.loads((self.folder / "stdout.log").read_text().splitlines()[-1]))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.chdir(tmp_path)
    made = Bench(tmp_path)
    yield made
    if made.standby is not None:
        made.standby.end()


def test_it_is_the_script(bench: Bench) -> None:
    bench.start("train.py", "--enable-high-availability", "--distributed-backend", "gloo")
    (bench.folder / "stdout.log").write_text("before\n")
    found = bench.obeys()
    assert found["argv"] == ["train.py", "--enable-high-availability", "--distributed-backend", "gloo"]
    assert found["path"] == found["cwd"] == str(bench.folder)
    assert found["file"] == str(bench.folder / "train.py")
    assert found["rank"] == "3" and found["left"] == []
    assert found["child"] == [True, "3", "__mp_main__"]
    assert found["leads"] is True and found["threads"] == 1
    assert found["descriptors"] == [0, 1, 2]
    assert found["patched"] is True, "though the plugin had been imported before"
    assert (bench.folder / "stdout.log").read_text().startswith("before\n{")
    assert (bench.folder / "stderr.log").read_text().endswith("the end\n")


def test_it_is_the_module(bench: Bench) -> None:
    bench.start("-m", "train", "--x")
    found = bench.obeys()
    assert found["argv"] == [str(bench.folder / "train.py"), "--x"]
    assert found["child"] == [True, "3", "__mp_main__"]
    assert found["patched"] is False


def test_without_an_order_it_ends_silently(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    standby = bench.start("train.py")
    bench.ready()
    assert psutil.Process(standby.process.pid).net_connections() == []
    standby.close()
    assert standby.process.wait(10.0) == 0
    assert capfd.readouterr() == ("", "")
