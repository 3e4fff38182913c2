"""A cluster for tests: starts TaskD (support.taskd_process) and ranks, and decides as MindCluster's clusterd does.

a fault is reported or a process dies -> stop_train
-> (stopped) -> the processes of faulty ranks are ended, on_global_rank
-> (strategies) -> change_strategy; new processes for recover
-> (result) -> done, or the next strategy
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from mindio_tft_patch.protocol.keys import new_keys, write_keys
from support.jobs import free_port

RETRIABLE = (0, 2)  # types of fault that computing again may cure


class Cluster:
    """One job in the cluster.

    Args:
        checkout: of Ascend/mind-cluster.
        folder: for logs, keys and output.
        command: of a rank, without its environment.
        configured: strategies that the job allows, in the order in which they are preferred.
        face: "manager" or "recover", see support.taskd_process.
        encrypted: a key file is given to TaskD and ranks.
    """

    def __init__(
        self,
        checkout: Path,
        folder: Path,
        command: Sequence[str],
        *,
        world_size: int = 2,
        configured: Sequence[str] = ("retry", "recover", "dump"),
        face: str = "manager",
        encrypted: bool = True,
        **variables: str,
    ) -> None:
        self.folder = folder
        self.configured = list(configured)
        self.messages: list[dict[str, Any]] = []
        self.ordered: list[str] = []
        self.starts = dict.fromkeys(range(world_size), 0)
        self._checkout, self._command, self._face = checkout, list(command), face
        self._world_size = world_size
        self._faults: dict[int, int] = {}
        self._state = "healthy"
        self._tried: list[str] = []
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._changed = threading.Condition()
        store_port = free_port()
        # As the store of torchrun's agent on the first node: it outlives every rank.
        self._store = TCPStore("127.0.0.1", store_port, None, True, wait_for_workers=False)
        self._environ = {
            **os.environ,
            "MINDX_TASK_ID": "task",
            "MINDX_SERVER_IP": "127.0.0.1",
            "POD_IP": "127.0.0.1",
            "TTP_PORT": str(free_port()),
            "PROCESSOR_ADDR": "127.0.0.1",
            "PROCESS_RECOVER": "on",
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store_port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
            "TASKD_LOG_PATH": str(folder / "taskd"),
            "TASKD_LOG_STDOUT": "False",
            "TTP_LOG_PATH": str(folder / "logs"),
            "TFT_COLLECT_SECONDS": "0.1",
            "TTP_OT": "40",
            "TTP_RETRY_TIMES": "60",
            **variables,
        }
        if encrypted:
            write_keys(folder / "keys.json", new_keys())
            self._environ["TFT_KEYS"] = str(folder / "keys.json")

    # Processes.

    def start(self) -> None:
        script = Path(__file__).with_name("taskd_process.py")
        self._taskd = subprocess.Popen(
            [sys.executable, str(script), str(self._checkout / "component" / "taskd"), self._face],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "taskd.txt").open("wb"),
            env=self._environ,
            cwd=self.folder,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        for rank in self.starts:
            self._start_rank(rank)

    def _start_rank(self, rank: int) -> None:
        self.starts[rank] += 1
        output = (self.folder / f"rank_{rank}.txt").open("ab")
        self._ranks[rank] = subprocess.Popen(
            self._command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**self._environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=self.folder,
        )

    def kill(self, rank: int) -> None:
        """End the process of a rank."""
        self._ranks[rank].send_signal(signal.SIGKILL)
        self._ranks[rank].wait()

    def output(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.txt").read_text(errors="replace")

    def close(self) -> None:
        processes = [self._taskd, *self._ranks.values()]
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()

    # What TaskD says, on a thread.

    def _listen(self) -> None:
        assert self._taskd.stdout is not None
        for line in self._taskd.stdout:
            with self._changed:
                self.messages.append(json.loads(line))
                self._changed.notify_all()

    def said(self, action: str) -> list[dict[str, Any]]:
        """Messages of a kind, so far."""
        return [one for one in list(self.messages) if one["action"] == action]

    # What the cluster does.

    def order(self, action: str, **more: Any) -> None:
        """Have TaskD carry something out."""
        ranks = {str(rank): kind for rank, kind in more.pop("fault_ranks", {}).items()}
        order = {"actions": [action], "fault_ranks": ranks, "strategy": "", "params": "", "timeout": 0, **more}
        self.ordered.append(more.get("strategy") or action)
        assert self._taskd.stdin is not None
        self._taskd.stdin.write(json.dumps(order).encode() + b"\n")
        self._taskd.stdin.flush()

    def until(self, condition: Callable[[], object], seconds: float = 100.0) -> None:
        """Run the cluster until something holds."""
        deadline = time.monotonic() + seconds
        handled = getattr(self, "_handled", 0)
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen in {seconds} s\n{self.story()}"
            with self._changed:
                self._changed.wait(0.05)
            while handled < len(self.messages):
                handled += 1
                self._take(self.messages[handled - 1])
            self._handled = handled
            self._look_at_processes()

    def ended(self) -> bool:
        """All ranks have ended."""
        return all(process.poll() is not None for process in self._ranks.values())

    def codes(self) -> list[int | None]:
        return [self._ranks[rank].poll() for rank in self.starts]

    def _look_at_processes(self) -> None:
        """A process that has died is a fault that the agent of its node reports."""
        dead = {rank: 1 for rank, process in self._ranks.items() if process.poll() not in (None, 0)}
        if self._state == "healthy" and dead:
            self.fault(dead)

    def fault(self, ranks: dict[int, int]) -> None:
        self._faults |= ranks
        if self._state == "healthy":
            self._state, self._tried = "stopping", []
            self.order("stop_train", fault_ranks=self._faults)

    def _take(self, message: dict[str, Any]) -> None:
        action = message["action"]
        if action == "process_fault":
            self.fault({int(rank): kind for rank, kind in message["fault_ranks"].items()})
        elif action == "stop_complete" and self._state == "stopping":
            assert message["code"] == 0, message
            self._name()
        elif action == "recover_strategy" and self._state == "naming":
            self._choose(message["strategy_list"])
        elif action == "recover_status" and self._state == "recovering":
            self._finish(message)

    def _name(self) -> None:
        self._state = "naming"
        others = [rank for rank, kind in self._faults.items() if kind not in RETRIABLE]
        if others or self._tried:
            # One that cannot be computed again makes all of them so, and their processes are ended.
            self._faults = dict.fromkeys(self._faults, 1)
            for rank in self._faults:
                if self._ranks[rank].poll() is None:
                    self.kill(rank)
        self.order("on_global_rank", fault_ranks=self._faults)

    def _choose(self, possible: Sequence[str]) -> None:
        self._possible = list(possible)
        fitting = [word for word in self.configured if word in possible and word not in self._tried]
        word = fitting[0] if fitting else "exit"
        self._state = "recovering"
        self._tried.append(word)
        self.order("change_strategy", strategy=word)
        if word == "recover":
            for rank in self._faults:
                self._start_rank(rank)

    def _finish(self, message: dict[str, Any]) -> None:
        if message["code"] == 0:
            self._state = "healthy" if message["strategy"] in ("retry", "recover") else "over"
            self._faults = {}
        elif message["code"] == 405:
            self._name()
        else:
            left = ["dump", "exit"] if message["code"] == 406 else ["exit"]
            self._choose(left)

    def story(self) -> str:
        """Everything that helps to understand a failure."""
        parts = [f"state {self._state}, ordered {self.ordered}", *map(str, self.messages)]
        parts += [(self.folder / "taskd.txt").read_text(errors="replace")[-3000:]]
        return "\n".join([*parts, *(f"== rank {rank}\n{self.output(rank)[-2500:]}" for rank in self.starts)])
