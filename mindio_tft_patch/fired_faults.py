"""Which faults of a schedule have happened in this job: one small file for each, in a folder that all ranks see.

A file is claimed before the fault happens, and by exactly one process: neither the process that takes the place of a
killed one nor a forked helper repeats a fault. The files are also the report of what was really injected, and when.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Firing:
    """A fault that has happened.

    number: place in the schedule. words: the entry. completed: last complete step then. time: seconds since 1970.
    pid: of the process that it happened to.
    """

    number: int
    words: str
    completed: int
    time: float
    pid: int


class FiredFaults:
    """The folder.

    Args:
        folder: made if need be.
        clock: seconds since 1970, because processes compare them.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock

    def claim(self, number: int, words: str, completed: int, times: int = 1) -> bool:
        """The caller may carry out the fault: it has happened fewer than `times` times, and now counts once more.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for turn in range(times):
            try:
                descriptor = os.open(self._folder / f"{number}.{turn}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                continue
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                json.dump(asdict(Firing(number, words, completed, self._clock(), os.getpid())), stream)
            return True
        return False

    def withdraw(self, number: int) -> None:
        """The last fault of this number that this process has claimed could not be carried out after all."""
        own = [one for one in self.read() if (one.number, one.pid) == (number, os.getpid())]
        for path in self._folder.glob(f"{number}.*") if own else ():
            if _read(path) == own[-1]:
                path.unlink()

    def read(self) -> list[Firing]:
        """What has happened, in the order in which it did."""
        found = [firing for path in self._folder.glob("*.*") if (firing := _read(path)) is not None]
        return sorted(found, key=lambda firing: firing.time)


def _read(path: Path) -> Firing | None:
    try:
        return Firing(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None  # being written by a process that was stopped in the middle
