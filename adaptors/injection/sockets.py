"""Breaks this process's connections to other ranks: a network fault that is a real one.

gloo keeps its sockets to itself. They are found from outside: the descriptors of this process that are established TCP
connections, less those that a recovery needs (the job's store and the controller).
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

log = logging.getLogger("mindio_tft_patch.injection")

_ESTABLISHED = "01"


def break_connections(spared: Collection[int], proc: Path = Path("/proc/self")) -> int:
    """Shut down every established TCP connection of this process, in both directions.

    Args:
        spared: ports, here or there, of connections that are left alone.

    Returns:
        How many connections were broken.
    """
    inodes = _connections(proc, spared)
    broken = 0
    for entry in list((proc / "fd").iterdir()):
        with suppress(OSError):  # closed by another thread meanwhile
            if os.readlink(entry) not in inodes:
                continue
            # A copy: closing it leaves the owner's descriptor as it is, while shutdown reaches the connection itself.
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                broken += 1
    log.warning("%d connection(s) to other ranks were broken on purpose", broken, extra={"fields": {"broken": broken}})
    return broken


def _connections(proc: Path, spared: Collection[int]) -> frozenset[str]:
    """Names, as links below /proc/self/fd have them, of the connections to break."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                ports = {int(address.rpartition(":")[2], 16) for address in words[1:3]}
                if words[3] == _ESTABLISHED and not ports & set(spared):
                    found.add(f"socket:[{words[9]}]")
    return frozenset(found)
