"""Two nodes on one machine: two network namespaces with addresses of their own and a link between them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from support.jobs import ROOT, Job, JobSpec

ADDRESSES = ("10.231.77.1", "10.231.77.2")
_DEVICE = "tftlink"
_RANKS_PER_NODE = 2


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, timeout=20)


class Nodes:
    """The two namespaces."""

    def __init__(self, tag: str) -> None:
        self.names = tuple(f"tft-{tag}-{number}" for number in range(2))

    def open(self) -> None:
        """Make them.

        Raises:
            CalledProcessError, OSError: not allowed here, or no `ip`.
        """
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "link",
            "add",
            _DEVICE,
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            "name",
            _DEVICE,
            "netns",
            self.names[1],
        )
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", _DEVICE)
            _ip("-n", name, "link", "set", _DEVICE, "up")

    def close(self) -> None:
        """Remove them."""
        for name in self.names:
            _ip("netns", "del", name, check=False)

    def cut(self) -> None:
        """The link of node 1 goes down."""
        _ip("-n", self.names[1], "link", "set", _DEVICE, "down")

    def mend(self) -> None:
        """It comes up again."""
        _ip("-n", self.names[1], "link", "set", _DEVICE, "up")


@contextlib.contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Namespaces for the time of a test."""
    nodes = Nodes(str(os.getpid()))
    try:
        nodes.open()
        yield nodes
    finally:
        nodes.close()


def why_not() -> str:
    """Why network namespaces cannot be had here; empty when they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    try:
        with two_nodes():
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made: {error}"


class TwoNodeJob(Job):
    """A job of two launchers, one in each namespace; `pid` is the first one's."""

    def __init__(self, spec: JobSpec, nodes: Nodes, port: int) -> None:
        spec.folder.mkdir(parents=True, exist_ok=True)
        self._nodes = nodes
        self._port = port
        self._launchers: list[subprocess.Popen[bytes]] = []
        super().__init__(spec, 0)
        self._launchers = [self._launch(node) for node in range(2)]
        self.pid = self._launchers[0].pid

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        spec = self.spec
        options: Sequence[str] = (
            *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", str(_RANKS_PER_NODE)),
            *("--master-addr", ADDRESSES[0], "--master-port", str(self._port)),
            *("--log-dir", str(spec.folder / f"out{node}"), "--redirects", "3"),
        )
        script = ROOT / "tests" / "support" / "armed_pretrain.py"
        flags = ["--enable-high-availability"] if spec.plugin else []
        command = [str(Path(sys.executable).with_name("ttprun")), *options, str(script), *spec.arguments, *flags]
        variables = {
            "GLOO_SOCKET_IFNAME": _DEVICE,
            "TTP_ADDR": ADDRESSES[0],
            "CONTROLLER_ADDR": ADDRESSES[0],
            "PROCESSOR_ADDR": ADDRESSES[0],
        }
        with (spec.folder / f"launcher{node}.txt").open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._nodes.names[node], *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **spec.variables(), **variables},
                cwd=spec.folder,
                start_new_session=True,
            )

    def kill_node(self) -> None:
        """The launcher of node 1 is killed, and its ranks with it."""
        launcher = self._launchers[1]
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(10)
        psutil.wait_procs(ranks, timeout=10)
        assert not any(process.is_running() for process in ranks)

    def start_node(self) -> None:
        """The same command line again, on node 1."""
        self._launchers[1] = self._launch(1)

    def poll(self) -> int | None:
        """Worst exit code of the launchers; None while one runs."""
        codes = [launcher.poll() for launcher in self._launchers]
        self.code = None if None in codes or not codes else max(abs(code) for code in codes if code is not None)
        return self.code

    def look_at_family(self) -> None:
        """Remember the processes of both."""
        for launcher in self._launchers:
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(launcher.pid).children(recursive=True):
                    self.family.setdefault(process.pid, process)

    def kill(self) -> None:
        """End everything."""
        self.look_at_family()
        for launcher in self._launchers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
        super().kill()

    @property
    def launcher_output(self) -> str:
        """Of both."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("launcher?.txt")))

    def output(self, rank: int, stream: str = "stdout", attempt: int = 0) -> str:
        """What a rank has printed, over all launchers of its node, in their order."""
        local, node = rank % _RANKS_PER_NODE, rank // _RANKS_PER_NODE
        found = (self.folder / f"out{node}").glob(f"*/attempt_{attempt}/{local}/{stream}.log")
        by_age = sorted(found, key=lambda path: path.stat().st_mtime)
        return "".join(path.read_text(errors="replace") for path in by_age)

    def wait_for_record(self, seconds: float = 120.0) -> None:
        """Until a recovery has ended."""
        deadline = time.monotonic() + seconds
        while not self.records():
            assert self.poll() is None and time.monotonic() < deadline, f"no recovery\n{self.story()}"
            time.sleep(0.1)
