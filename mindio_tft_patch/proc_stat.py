"""The processes of this machine, as /proc/PID/stat has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stat:
    """One process. folder: of it in /proc. state: a letter, as `ps` has it. parent, group: process ids."""

    pid: int
    folder: Path
    state: str
    parent: int
    group: int


def processes() -> Iterator[Stat]:
    """All that can be read; one that ends meanwhile is left out."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                # The name of the program stands in parentheses and may hold anything.
                state, parent, group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                yield Stat(int(folder.name), folder, state, int(parent), int(group))
