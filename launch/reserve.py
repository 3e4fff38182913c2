"""Stand-bys of one node: processes that have imported everything and wait to become the rank that is lost next.

This is the launcher's side; launch.standby is what runs in such a process. A stand-by is a direct child of the launcher
and leads a session of its own, so that it can become a rank without anybody noticing the difference. It is told what to
be through a pipe; it ends when that pipe is closed, so none of them outlives the launcher.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

log = logging.getLogger("mindio_tft_patch.launch")

REFILL_SECONDS = 5.0  # from the end of a recovery to the start of the next stand-by, which takes a core for a while
BECOMES = "the stand-by process %d becomes rank %s"  # in the log; the benchmark looks for it
ACCEPT_SECONDS = 1.0  # a stand-by takes its order in a moment; one that is stopped or swapped out is passed over
MOST_FAILURES = 3  # in a row, before a stand-by was ready

_READY, _ACCEPTED = b"ready\n", b"accepted\n"
# Variables that make a rank a certain rank; a stand-by does not know yet which it will be.
_OF_ONE_RANK = frozenset({"RANK", "LOCAL_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE"})


@dataclass(frozen=True)
class Order:
    """What a stand-by is to become.

    Attributes:
        command: the rank's command line, interpreter first.
        wrapped: the same as torchelastic would start it: perhaps behind numactl.
        environ: all variables.
        stdout: file to append to; None: the launcher's own standard output.
        stderr: likewise.
    """

    command: tuple[str, ...]
    wrapped: tuple[str, ...]
    environ: Mapping[str, str]
    stdout: str | None
    stderr: str | None
    cwd: str = field(default_factory=os.getcwd)

    def encoded(self) -> bytes | None:
        """As a stand-by reads it; None when a process that runs already cannot be brought there."""
        cpus = cpus_of(self.wrapped[: len(self.wrapped) - len(self.command)])
        if cpus is None:
            return None
        return json.dumps({**asdict(self), "args": self.command, "cpus": sorted(cpus)}).encode()


def cpus_of(prefix: Sequence[str]) -> frozenset[int] | None:
    """Processors that torchelastic's numactl prefix binds to; empty: no binding. None: a prefix of another kind."""
    if not prefix:
        return frozenset()
    if len(prefix) != 2 or prefix[0] != "numactl" or not prefix[1].startswith("--physcpubind="):
        return None
    cpus: set[int] = set()
    for part in prefix[1].partition("=")[2].split(","):
        low, _, high = part.partition("-")
        if not low.isdecimal() or not (high or low).isdecimal():
            return None
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)


def standby_command(entrypoint: str, arguments: Sequence[str]) -> list[str] | None:
    """Command line of a stand-by for ranks of this command; None when ranks are not Python programs (--no-python)."""
    if entrypoint != os.environ.get("PYTHON_EXEC", sys.executable) or list(arguments[:1]) != ["-u"]:
        return None
    return [entrypoint, "-u", "-m", "mindio_tft_patch.launch.standby", *arguments[1:]]


class Standby:
    """One stand-by.

    Args:
        process: subprocess.Popen, or what looks like one.
        orders: pipe to it.
        answers: pipe from it.

    Attributes:
        announced: the log says that it is ready.
    """

    def __init__(self, process: Any, orders: int, answers: int) -> None:
        self.process = process
        self._orders = orders
        self._answers = answers
        self._said = b""
        self.announced = False
        os.set_blocking(orders, False)
        os.set_blocking(answers, False)

    @property
    def ready(self) -> bool:
        """It has imported everything."""
        self._listen()
        return self._said.startswith(_READY)

    def accept(self, order: bytes) -> bool:
        """Tell it what to be; False when it does not do so at once."""
        try:
            sent = os.write(self._orders, order) == len(order)
            os.close(self._orders)
            self._orders = -1
            deadline = time.monotonic() + ACCEPT_SECONDS
            while sent and not self._said.endswith(_ACCEPTED) and self.process.poll() is None:
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                    return False
                self._listen()
        except OSError:
            return False
        return self._said.endswith(_ACCEPTED)

    def close(self) -> None:
        """Give the pipes back."""
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._answers = -1

    def end(self) -> None:
        """End it."""
        self.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)

    def _listen(self) -> None:
        if self._answers >= 0:
            with contextlib.suppress(BlockingIOError):
                self._said += os.read(self._answers, 4096)


def start_standby(command: Sequence[str], environ: Mapping[str, str]) -> Standby:
    """Start a process that imports everything and waits.

    Raises:
        OSError: it cannot be started.
    """
    pipes = [*os.pipe(), *os.pipe()]
    reading, orders, answers, writing = pipes
    variables = {name: value for name, value in environ.items() if name not in _OF_ONE_RANK}
    variables["TFT_STANDBY"] = f"{reading},{writing},{os.getpid()}"
    try:
        process = subprocess.Popen(command, env=variables, pass_fds=(reading, writing), start_new_session=True)
    except BaseException:
        for descriptor in (orders, answers):
            os.close(descriptor)
        raise
    finally:
        os.close(reading)
        os.close(writing)
    return Standby(process, orders, answers)


class Reserve:
    """The stand-bys of one node.

    Args:
        size: how many to keep.
        start: starts one.
        clock: monotonic seconds.
    """

    def __init__(self, size: int, start: Callable[[], Standby], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = size
        self._start = start
        self._clock = clock
        self._standbys: list[Standby] = []
        self._fill_at: float | None = clock()
        self._failures = 0
        self._given: str | None = None  # rank that the last one became, until the next is started

    def tend(self, *, recovering: bool) -> None:
        """Notice stand-bys that have died, and start what is missing when that disturbs nobody."""
        for standby in list(self._standbys):
            if standby.ready:
                self._failures = 0
                if not standby.announced:
                    standby.announced = True
                    log.info("the stand-by process %d is ready", standby.process.pid)
            elif standby.process.poll() is not None:
                self._failures += 1
            if standby.process.poll() is not None:
                self._drop(standby, f"the stand-by process {standby.process.pid} has ended")
        if len(self._standbys) >= self._size or recovering:
            self._fill_at = None
            return
        if self._fill_at is None:
            self._fill_at = self._clock() + REFILL_SECONDS
        if self._clock() < self._fill_at or self._failures >= MOST_FAILURES:
            return
        try:
            self._standbys.append(self._start())
            self._given = None
        except OSError as error:
            self._failures += 1
            log.warning("a stand-by could not be started: %s", error)
        if self._failures >= MOST_FAILURES:
            log.error("%d stand-bys in a row have failed: there will be none", MOST_FAILURES)

    def take(self, order: Order) -> Any | None:
        """A stand-by that has become what the order says, as subprocess.Popen; None when there is none."""
        encoded = order.encoded()
        why = self._none_is_there() if encoded is not None else f"it cannot be started behind {order.wrapped[0]}"
        for standby in list(self._standbys) if encoded is not None else ():
            process = standby.process
            if process.poll() is not None:
                self._drop(standby, why := f"the stand-by process {process.pid} has ended")
            elif not standby.ready:
                why = f"the stand-by process {process.pid} is not ready yet"
            elif not standby.accept(encoded or b""):
                self._drop(standby, why := f"the stand-by process {process.pid} did not take its order")
            else:
                self._standbys.remove(standby)
                standby.close()
                self._given = str(order.environ.get("RANK", "?"))
                log.info(BECOMES, process.pid, self._given)
                return process
        log.warning("no stand-by is used: %s; a new process is started", why)
        return None

    def close(self) -> None:
        """End all of them."""
        self._size = 0
        for standby in self._standbys:
            standby.end()
        self._standbys.clear()

    def _none_is_there(self) -> str:
        if self._given is None:
            return "there is none"
        of = "the only stand-by" if self._size == 1 else f"the last of {self._size} stand-bys"
        return f"{of} has just become rank {self._given}"

    def _drop(self, standby: Standby, why: str) -> None:
        log.warning("%s", why)
        self._standbys.remove(standby)
        standby.end()
