"""CPU time of processes and threads, in nanosecond resolution. Linux only."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

CONTROL_THREAD = "mindio-tft-control"
_ZEROMQ_THREADS = "ZMQbg"


def control_cpu_seconds() -> float:
    """CPU time so far of the threads that talk to the controller: ours and ZeroMQ's, which encrypts."""
    threads = [thread.native_id for thread in threading.enumerate() if thread.name == CONTROL_THREAD]
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().startswith(_ZEROMQ_THREADS):
                threads.append(int(task.name))
    return sum(_thread_cpu_seconds(thread) for thread in threads if thread is not None)


def process_cpu_seconds(pid: int = 0) -> float:
    """CPU time so far of a process; Linux's clock for it, which counts nanoseconds."""
    return time.clock_gettime((~(pid or os.getpid())) << 3 | 2)


def _thread_cpu_seconds(thread: int) -> float:
    # What pthread_getcpuclockid makes of a thread; for threads without a Python identifier as well.
    return time.clock_gettime((~thread) << 3 | 6)
