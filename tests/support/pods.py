"""The pods of a manifest on one machine: each in a network namespace, with its variables and the names of its Services.

The command is the pod's own (launch/kubernetes/common/start.sh). In place of what a cluster would provide stand a tiny
model, two ranks a node, and folders of the test where a pod has volumes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from support import manifests
from support.jobs import RANKS, ROOT, JobSpec
from support.two_nodes import ADDRESSES, Nodes, TwoNodeJob

_NAMES = Path("/etc/netns")  # `ip netns exec` shows a namespace what is in here in place of files in /etc
_SERVICES = ("pretrain-gpt-master-0", "pretrain-gpt-node-0.pretrain-gpt")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20).stdout


@contextlib.contextmanager
def pod_network(nodes: Nodes) -> Iterator[None]:
    """Give both namespaces what pods have: an interface eth0, and the names of Services."""
    folders = [_NAMES / name for name in nodes.names]
    try:
        for name, folder in zip(nodes.names, folders, strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {' '.join(_SERVICES)}\n")
            (link,) = (link["ifname"] for link in json.loads(_ip("-n", name, "-j", "link")) if link["ifname"] != "lo")
            for change in (("down",), ("name", "eth0")):
                _ip("-n", name, "link", "set", link, *change)
            _ip("-n", name, "link", "set", "eth0", "up")
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _from_operator(kind: str, node: int) -> dict[str, str]:
    """What the operator of a job adds to the variables of its pods."""
    if kind == "Job":
        return {"VC_TASK_INDEX": str(node), "VK_TASK_INDEX": str(node)}
    master = {"MASTER_ADDR": _SERVICES[0], "MASTER_PORT": "23456"}
    place = {"WORLD_SIZE": "16", "RANK": str(node), "PET_NODE_RANK": str(node), "PET_NNODES": "2"}
    return {**master, **{f"PET_{name}": value for name, value in master.items()}, **place, "PET_NPROC_PER_NODE": "8"}


class PodJob(TwoNodeJob):
    """A job of two pods.

    Args:
        folder: of launch/kubernetes.
    """

    def __init__(self, spec: JobSpec, nodes: Nodes, folder: str) -> None:
        self._manifest = manifests.job_of(manifests.render(manifests.MANIFESTS / folder))
        command = spec.folder / "job"
        command.mkdir(parents=True)
        shutil.copy(manifests.MANIFESTS / "common" / "start.sh", command)
        words = [*spec.arguments, "--enable-high-availability"]
        (command / "arguments").write_text("# of the test\n" + "\n".join(words) + "\n")
        super().__init__(spec, nodes, 0)

    def variables_of(self, node: int) -> dict[str, str]:
        """Variables of a pod's container, in a cluster."""
        replicas = [*manifests.roles(self._manifest).values()]
        own = manifests.variables(replicas[min(node, len(replicas) - 1)], {"status.podIP": ADDRESSES[node]})
        return {**own, **_from_operator(self._manifest["kind"], node)}

    def _launch(self, node: int) -> subprocess.Popen[bytes]:
        folder = self.spec.folder
        here = {
            "NPROC_PER_NODE": str(RANKS // len(ADDRESSES)),
            "SCRIPT": str(ROOT / "tests" / "support" / "armed_pretrain.py"),
            "TTP_LOG_PATH": str(folder / "logs"),
            "PET_LOG_DIR": str(folder / f"out{node}"),
            "PET_REDIRECTS": "3",
        }
        with (folder / f"launcher{node}.txt").open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._nodes.names[node], "bash", str(folder / "job" / "start.sh")],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **self.spec.variables(),
                    **self.variables_of(node),
                    **here,
                    **self.spec.environ,
                },
                cwd=folder,
                start_new_session=True,
            )

    def kill_pod(self, node: int) -> None:
        """The container of a pod is killed, and with it everything in it."""
        launcher = self._launchers[node]
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(10)
        assert not psutil.wait_procs(ranks, timeout=10)[1]

    def delete_pod(self, node: int) -> None:
        """A pod is deleted: process 1 of its container gets SIGTERM."""
        self._launchers[node].terminate()

    def wait_for_pod(self, node: int, seconds: float) -> int:
        """Wait for the end of a pod's container; its exit code."""
        return self._launchers[node].wait(seconds)

    def start_pod(self, node: int) -> None:
        """The container is started again, as the kubelet does."""
        self._launchers[node] = self._launch(node)
        self.pid, self.code = self._launchers[0].pid, None

    def ports_listening(self) -> set[int]:
        """Ports on which pods can be connected to now."""
        ports = set()
        for name in self._nodes.names:
            sockets = [line.split() for line in _ip("netns", "exec", name, "ss", "-Htln").splitlines()]
            ports |= {int(own.rpartition(":")[2]) for _, _, _, own, *_ in sockets if not own.startswith("127.")}
        return ports
