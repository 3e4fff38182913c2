"""The rank processes of this node: who still runs, how the others ended, and how to end what is left.

A process that has ended is *not reaped* here: as long as it is a zombie its pid, and so the id of its process group,
cannot be given to somebody else, and killing what it left behind (data-loader workers) cannot hit a stranger.
torchelastic reaps it afterwards. Every rank leads a process group of its own (torchelastic starts it in a new session).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import time
from collections.abc import Iterable, Mapping

log = logging.getLogger("mindio_tft_patch.launch")

# Without pidfds (kernel < 5.3) the ends of processes are looked for this often.
_POLL_SECONDS = 0.05


def _exit_code(pid: int) -> int | None:
    """Exit code of a child (negative: number of the signal that killed it); None: it runs. Does not reap."""
    try:
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # reaped by somebody else; its code is not known here
    if info is None:
        return None
    return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status


class LocalProcesses:
    """The processes of one attempt.

    Args:
        pids: global rank -> process id; each a direct child of this process.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._pidfds: dict[int, int] = {}
        for rank, pid in pids.items():
            self.add(rank, pid)

    def add(self, rank: int, pid: int) -> None:
        """A rank has a process."""
        self.pids[rank] = pid
        try:
            descriptor = os.pidfd_open(pid)
        except (AttributeError, OSError):
            return  # no pidfds on this system: wait() polls
        self._pidfds[rank] = descriptor
        self._selector.register(descriptor, selectors.EVENT_READ)

    def remove(self, rank: int) -> None:
        """A rank has no process any more: somebody has reaped it."""
        self._forget(rank)
        self.pids.pop(rank, None)
        self.ended.pop(rank, None)

    @property
    def running(self) -> frozenset[int]:
        """Ranks that had not ended at the last look()."""
        return frozenset(self.pids) - frozenset(self.ended)

    def wake(self) -> None:
        """Let wait() return now. Safe in signal handlers and in other threads."""
        with contextlib.suppress(OSError):  # a wake-up is pending already, or everything is over
            os.write(self._wake_write, b"x")

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a process ends, wake() is called, or the time is over."""
        timeout_seconds = max(0.0, timeout_seconds)
        if len(self._pidfds) < len(self.running):
            timeout_seconds = min(timeout_seconds, _POLL_SECONDS)
        for key, _ in self._selector.select(timeout_seconds):
            if key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)

    def look(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended since the last look."""
        new: dict[int, int] = {}
        for rank in self.running:
            code = _exit_code(self.pids[rank])
            if code is not None:
                new[rank] = code
                self._forget(rank)
        self.ended.update(new)
        return new

    def signal(self, ranks: Iterable[int], signum: signal.Signals) -> None:
        """Send a signal to the process groups of ranks, data-loader workers included."""
        for rank in sorted(ranks):
            if rank in self.pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pids[rank], signum)

    def end_leftovers(self, grace_seconds: float = 1.0) -> None:
        """End what ended ranks have left behind in their process groups."""
        left = [rank for rank in self.ended if self._has_children(rank)]
        if not left:
            return
        log.info("ending processes that rank(s) %s left behind", ", ".join(map(str, left)))
        self.signal(left, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and any(self._has_children(rank) for rank in left):
            time.sleep(_POLL_SECONDS)
        self.signal(left, signal.SIGKILL)

    def close(self) -> None:
        """Give the file descriptors back; the processes are left alone."""
        for rank in list(self._pidfds):
            self._forget(rank)
        self._selector.close()
        os.close(self._wake_read)
        # The write end is closed last and never reused: a late wake() must not write into somebody else's file.
        os.close(self._wake_write)
        self._wake_write = -1

    def _forget(self, rank: int) -> None:
        descriptor = self._pidfds.pop(rank, None)
        if descriptor is not None:
            self._selector.unregister(descriptor)
            os.close(descriptor)

    def _has_children(self, rank: int) -> bool:
        """Whether the process group of an ended rank holds more than its (not yet reaped) leader."""
        group = self.pids[rank]
        try:
            entries = os.listdir("/proc")
        except OSError:
            return True  # cannot tell on this system: the signals do no harm
        for entry in entries:
            if not entry.isdecimal() or int(entry) == group:
                continue
            try:
                if os.getpgid(int(entry)) == group:
                    return True
            except OSError:
                continue
        return False
