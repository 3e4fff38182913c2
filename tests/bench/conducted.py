"""The rank's side of a benchmark: trains block by block, as the conductor says, and tells how long a block took.

A block is a number of steps in one mode. All ranks of the job meet in a barrier before and after the timed steps.
Between two blocks a rank waits for the conductor on a socket, without using the CPU, so that several jobs can exist
at the same time and take turns every second: whatever slows the machine meets all of them.

    mode     plain   no plugin in this job
             on      the plugin as ever
             off     the same job with the plugin turned off (switch.py)
             probe   on, with clocks inside (probes.py)
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
import wrapt

import mindio_tft_patch
from bench import dumping
from bench.conductor import SOCKET
from bench.cpu_clocks import control_cpu_seconds, process_cpu_seconds
from bench.probes import GateProbe
from bench.switch import Switch


def take_part(environ: Mapping[str, str]) -> None:
    """Call it before the training script."""
    from megatron.training import training

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(environ[SOCKET])
    rank = ConductedRank(connection)
    rank.say({"rank": int(environ["RANK"]), "pid": os.getpid()})
    training.train_step = wrapt.FunctionWrapper(training.train_step, rank.around_train_step)


class ConductedRank:
    """One rank.

    Args:
        connection: to the conductor; a JSON object a line in both directions.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw", encoding="utf-8")
        self._untimed = self._timed = 0  # steps that are left in this block
        self._began: tuple[float, float, float, int] | None = None
        self._switch: Switch | None = None
        self._probe: GateProbe | None = None

    def say(self, message: Mapping[str, Any]) -> None:
        """Tell the conductor."""
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def around_train_step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Wrapper of train_step, outside of the plugin's own."""
        if self._untimed == 0:
            while self._timed == 0:
                self._end_block()
                self._obey()
            if self._began is None and self._untimed == 0:
                self._start_clocks()
        if self._untimed:
            self._untimed -= 1
        else:
            self._timed -= 1
        return wrapped(*args, **kwargs)

    def _obey(self) -> None:
        line = self._lines.readline()
        command = json.loads(line) if line else {"do": "end"}
        if command["do"] == "end":
            raise SystemExit(0)
        if command["do"] == "block":
            self._turn(command["mode"])
            self._untimed, self._timed = command["untimed"], command["steps"]
            return
        self.say(getattr(dumping, command.pop("do"))(mindio_tft_patch.installation(), **command))

    def _turn(self, mode: str) -> None:
        installation = mindio_tft_patch.installation()
        if installation is None:
            assert mode == "plain"
            return
        if self._switch is None or self._probe is None:
            self._switch, self._probe = Switch(installation), GateProbe(installation.session.gate)
        self._switch.turn(mode != "off")
        self._probe.turn(mode == "probe")

    def _start_clocks(self) -> None:
        control, calls = control_cpu_seconds(), self._calls()
        dist.barrier()
        self._began = time.perf_counter(), process_cpu_seconds(), control, calls

    def _end_block(self) -> None:
        if self._began is None:
            return
        dist.barrier()
        now, cpu = time.perf_counter(), process_cpu_seconds()
        control = control_cpu_seconds()
        began, self._began = self._began, None
        result: dict[str, Any] = {
            "seconds": now - began[0],
            "cpu_seconds": cpu - began[1],
            "control_cpu_seconds": control - began[2],
            "calls": self._calls() - began[3],
        }
        if self._probe is not None:
            result |= {"gate": self._probe.passes, "marks": self._probe.marks}
        self.say(result)

    def _calls(self) -> int:
        return 0 if self._switch is None else self._switch.calls()
