"""Replacing the process of one rank while the others live.

The new process is started as torchelastic started the old one: same command, same environment, session and process
group of its own. Two things differ: log files are appended to, and a stand-by may take the place of a new interpreter.
torchelastic's own records are kept true, so that its end of the job (wait, close, error files) needs to know nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any, cast

from torch.distributed.elastic.multiprocessing.api import PContext, SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from mindio_tft_patch.errors import TftError
from mindio_tft_patch.launch.processes import LocalProcesses
from mindio_tft_patch.launch.reserve import Order, Reserve
from mindio_tft_patch.launch.vigil import KILL_GRACE_SECONDS

log = logging.getLogger("mindio_tft_patch.launch")

_POLL_SECONDS = 0.005
_REAP_SECONDS = 1.0

# What this file takes from torchelastic, beside what launch.ttprun checks for every job.
_HANDLER_PARAMETERS = ("entrypoint", "args", "env", "stdout", "stderr", "local_rank_id")
_CONTEXT_FIELDS = ("entrypoint", "args", "envs", "stdouts", "stderrs", "error_files")


class RespawnError(TftError):
    """A rank could not be started again."""


def missing_in_torch(
    handler: type = SubprocessHandler, context: type = SubprocessContext, base: type = PContext
) -> list[str]:
    """What a restart of one rank needs of torchelastic and does not find."""
    missing = []
    parameters = inspect.signature(handler).parameters
    if any(name not in parameters for name in _HANDLER_PARAMETERS):
        missing.append(f"SubprocessHandler({', '.join(_HANDLER_PARAMETERS)})")
    popen = getattr(handler, "_popen", None)
    if popen is None or list(inspect.signature(popen).parameters)[1:] != ["args", "env"]:
        missing.append("SubprocessHandler._popen(args, env)")
    stored = {*_names(base), *_names(context)}
    missing += [f"SubprocessContext.{name}" for name in (*_CONTEXT_FIELDS, "subprocess_handlers") if name not in stored]
    return missing


def _names(of: type) -> tuple[str, ...]:
    """Names of attributes that the constructor of a class writes."""
    code = getattr(vars(of).get("__init__"), "__code__", None)
    return () if code is None else cast("tuple[str, ...]", code.co_names)


class _Replacement(SubprocessHandler):  # type: ignore[misc]
    """torchelastic's handler of a process, for one that takes the place of another.

    Args:
        stdout: log file to append to; empty: the launcher's own standard output.
        stderr: likewise.
        reserve: stand-bys; None: there are none.
    """

    def __init__(self, *, stdout: str, stderr: str, reserve: Reserve | None, **named: Any) -> None:
        self._paths = (stdout or None, stderr or None)
        self._reserve = reserve
        self._command = (named["entrypoint"], *map(str, named["args"]))
        super().__init__(stdout=None, stderr=None, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        if self._reserve is not None:
            order = Order(self._command, args, env, *self._paths)
            standby = self._reserve.take(order)
            if standby is not None:
                return standby
        with contextlib.ExitStack() as files:
            self._stdout, self._stderr = (
                None if path is None else files.enter_context(open(path, "a")) for path in self._paths
            )
            try:
                return super()._popen(args, env)
            finally:
                # The process has its own by now; ours would only be kept open.
                self._stdout = self._stderr = None


class Respawner:
    """Starts ranks of this node anew.

    Args:
        context: torchelastic's records of the processes.
        workers: torchelastic's workers, by global rank.
        processes: who runs.
        reserve: stand-bys; None: there are none.
    """

    def __init__(
        self,
        context: SubprocessContext,
        workers: Mapping[int, Any],
        processes: LocalProcesses,
        reserve: Reserve | None,
    ) -> None:
        self._context = context
        self._workers = workers
        self._processes = processes
        self._reserve = reserve

    def restart(self, rank: int) -> None:
        """End what is left of the rank's process, and start a new one.

        Raises:
            RespawnError: the old process does not end, or a new one cannot be started.
        """
        worker = self._workers[rank]
        local_rank = worker.local_rank
        began = time.monotonic()
        old = self._context.subprocess_handlers[local_rank]
        self._retire(rank, old)
        self._put_aside(self._context.error_files[local_rank], old.proc.pid)
        numa = {"numa_options": self._context._numa_options} if hasattr(self._context, "_numa_options") else {}
        try:
            new = _Replacement(
                entrypoint=self._context.entrypoint,
                args=self._context.args[local_rank],
                env=self._context.envs[local_rank],
                stdout=self._context.stdouts[local_rank],
                stderr=self._context.stderrs[local_rank],
                local_rank_id=local_rank,
                reserve=self._reserve,
                **numa,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RespawnError(f"Rank {rank} cannot be started again: {error}") from error
        self._context.subprocess_handlers[local_rank] = new
        worker.id = new.proc.pid
        self._processes.add(rank, new.proc.pid)
        log.warning("rank %d runs again: process %d takes the place of %d", rank, new.proc.pid, old.proc.pid)
        log.info("rank %d was started again in %.3f s", rank, time.monotonic() - began)

    def _retire(self, rank: int, old: Any) -> None:
        """End the process and what it has started (data-loader workers), and reap it."""
        if old.proc.returncode is None:
            self._processes.signal([rank], signal.SIGKILL)
            deadline = time.monotonic() + KILL_GRACE_SECONDS
            while old.proc.poll() is None:
                if time.monotonic() > deadline:
                    raise RespawnError(
                        f"Rank {rank} cannot be started again: its old process {old.proc.pid} does not end "
                        "(uninterruptible sleep), and would keep the device."
                    )
                time.sleep(_POLL_SECONDS)
            _reap_group(old.proc.pid)
        self._processes.remove(rank)
        for file in (old._stdout, old._stderr):
            if file is not None:
                file.close()

    @staticmethod
    def _put_aside(error_file: str, pid: int) -> None:
        """What the old process wrote about its end must not be taken for the end of the new one."""
        with contextlib.suppress(OSError):
            if os.path.isfile(error_file):
                os.replace(error_file, f"{error_file}.{pid}")


def _reap_group(group: int) -> None:
    """In a container the launcher may be process 1, and inherit the children of a rank that has died."""
    deadline = time.monotonic() + _REAP_SECONDS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < deadline:
            if os.waitpid(-group, os.WNOHANG)[0] == 0:
                time.sleep(_POLL_SECONDS)
