"""A process that has imported torch and Megatron and forks launchers, which fork ranks: a job starts in a second.

    python fork_server.py          requests on standard input, answers on standard output, one JSON object a line

    request   {"job": 1, "argv": [arguments of ttprun], "environ": {...}, "output": path, "cwd": path, "ranks": 4}
    answers   {"job": 1, "pid": 4711} and, when the launcher has ended, {"job": 1, "code": 1}

The launcher of a job is ttprun's own `main`, in a process of its own. The only thing that is different from a real
ttprun is where a rank's process comes from: not from a new interpreter, but from a blank that this launcher forked
while it had no threads yet. Environment, log files, signals, process groups and exit codes are torchelastic's.

A child that this process forks comes back out of `main` with what it is to do, so that it ends as any interpreter does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Role = Callable[[], None]

_MODULES = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.training",
    "mindio_tft_patch.adaptors.megatron.install",
    "mindio_tft_patch.launch.agent",
    "mindio_tft_patch.launch.ttprun",
    "mindio_tft_patch.adaptors.injection.arm",
    "support.inject",
)
# What a job would import after its start; not every Megatron has all of it.
_IMPORTED_LATE = (
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.training.argument_utils",
    "mindio_tft_patch.adaptors.device.gloo",
    "numpy.random",
    "numpy.fft",
    "torch._dynamo.convert_frame",
    "torch._functorch._aot_autograd.runtime_wrappers",
    "torch._inductor.standalone_compile",
    "torch._inductor.test_operators",
    "torch._numpy.random",
    "torch.onnx",
)


def preload() -> None:
    """Import what ranks and launchers need, without threads, sockets or devices."""
    from mindio_tft_patch.adaptors.device.cpu import install_cpu_stand_in

    install_cpu_stand_in()
    import torch

    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(name)
    for name in _IMPORTED_LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    factory = getattr(sys.modules.get("megatron.training.argument_utils"), "ArgumentGroupFactory", None)
    if hasattr(factory, "_get_field_docstrings"):
        # Texts for --help, for which every rank would parse the sources of all configuration classes, twice.
        factory._get_field_docstrings = functools.cache(factory._get_field_docstrings)


class Server:
    """Starts jobs and tells how they ended.

    Args:
        answers: file descriptor that answers go to.
    """

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._jobs: dict[int, tuple[int, int]] = {}  # pidfd -> (job, pid)
        self._input = b""

    def serve(self) -> Role | None:
        """Serve until standard input ends. In a child: what it is to do."""
        while True:
            readable, _, _ = select.select([0, *self._jobs], [], [])
            for descriptor in readable:
                if descriptor != 0:
                    self._ended(descriptor)
            if 0 not in readable:
                continue
            received = os.read(0, 65536)
            if not received:
                self._kill_all()
                return None
            *lines, self._input = (self._input + received).split(b"\n")
            for line in lines:
                role = self._start(json.loads(line))
                if role is not None:
                    return role

    def _start(self, request: dict[str, Any]) -> Role | None:
        pid = os.fork()
        if pid == 0:
            os.close(self._answers)
            for descriptor in self._jobs:
                os.close(descriptor)
            return become_launcher(request)
        self._jobs[os.pidfd_open(pid)] = (request["job"], pid)
        self._answer({"job": request["job"], "pid": pid})
        return None

    def _ended(self, descriptor: int) -> None:
        job, pid = self._jobs.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._answer({"job": job, "code": os.waitstatus_to_exitcode(status)})

    def _answer(self, answer: dict[str, Any]) -> None:
        os.write(self._answers, json.dumps(answer).encode() + b"\n")

    def _kill_all(self) -> None:
        import psutil

        for _, pid in self._jobs.values():
            for process in [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]:
                process.kill()


def become_launcher(request: dict[str, Any]) -> Role:
    """In a fresh child: take over output, variables and folder of the job, and fork its blanks."""
    os.setsid()
    _redirect(request["output"], request["output"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    blanks = []
    for _ in range(request["ranks"]):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            for _, other in blanks:
                os.close(other)
            os.setsid()
            return functools.partial(run_rank, reading)
        os.close(reading)
        blanks.append((pid, writing))
    return functools.partial(run_launcher, request["argv"], blanks)


def run_launcher(argv: list[str], blanks: list[tuple[int, int]]) -> None:
    """Be ttprun, with blanks as the source of processes."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    from mindio_tft_patch.launch import agent, ttprun
    from mindio_tft_patch.launch.reserve import Standby

    assert threading.active_count() == 1

    def next_blank() -> tuple[int, int]:
        if not blanks:
            raise OSError("the fork server has no blank left: ForkServer.start(blanks=...)")
        return blanks.pop(0)

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> BlankProcess:
        pid, writing = next_blank()
        files = [None if file is None else file.name for file in (handler._stdout, handler._stderr)]
        order = {"args": list(args), "environ": env, "stdout": files[0], "stderr": files[1]}
        with os.fdopen(writing, "w") as pipe:
            json.dump(order, pipe)
        return BlankProcess(pid)

    def standby(command: Sequence[str], environ: Mapping[str, str]) -> Standby:
        """A blank is one already: all answers that it would give are in the pipe."""
        pid, writing = next_blank()
        answers, said = os.pipe()
        os.write(said, b"ready\naccepted\n")
        os.close(said)
        return Standby(BlankProcess(pid), writing, answers)

    SubprocessHandler._popen = popen
    agent.start_standby = standby
    sys.argv = ["ttprun", *argv]
    ttprun.main(argv)


class BlankProcess:
    """What torchelastic uses of subprocess.Popen, for a process that was forked already."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            TimeoutExpired: it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("rank", timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode


def run_rank(reading: int) -> None:
    """Be a rank, when the launcher says which; without a launcher, end."""
    with os.fdopen(reading) as pipe:
        content = pipe.read()
    if not content:
        os._exit(0)
    order = json.loads(content)
    os.environ.clear()
    os.environ.update(order["environ"])
    _redirect(order["stdout"], order["stderr"])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    script = next(position for position, word in enumerate(order["args"]) if word.endswith(".py"))
    sys.argv = order["args"][script:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    import mindio_tft_patch
    from support import inject

    mindio_tft_patch.activate(sys.argv[1:], os.environ)
    inject.arm(os.environ)
    runpy.run_path(sys.argv[0], run_name="__main__")


def _redirect(stdout: str | None, stderr: str | None) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        if path is not None:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def main() -> Role | None:
    """Returns, in a child, what it is to do."""
    answers = os.dup(1)
    os.dup2(2, 1)  # nothing that an import prints may look like an answer
    sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    preload()
    # What exists now is shared with all ranks as long as nobody writes to it; a garbage collection would.
    gc.collect()
    gc.freeze()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"{len(threads)} threads were started by imports; forking now could dead-lock")
    server = Server(answers)
    server._answer({"ready": os.getpid()})
    return server.serve()


if __name__ == "__main__":
    what_to_do = main()
    if what_to_do is not None:
        what_to_do()
