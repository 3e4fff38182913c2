"""gloo's connections to other ranks, found from outside, because gloo keeps its sockets to itself.

A collective that was cut off ends only when the connection on which it waits does. Closing the communicator does not
always end it: a forked process (a data-loader worker, Megatron's checkpoint writer) has inherited the descriptors, and
any work that somebody still refers to holds on to its communicator. A shut-down reaches the connection itself.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


def hang_up() -> int:
    """Shut down every connection to another rank that this process has.

    gloo's sockets are told by being open to programs that this process starts: those of Python, of the job's store and
    of the control plane are not.

    Returns:
        How many connections were ended. Without /proc none is found.
    """
    ended = 0
    with suppress(FileNotFoundError):
        for entry in list(_DESCRIPTORS.iterdir()):
            with suppress(OSError):  # closed meanwhile by another thread, or by the other side
                ended += _end(int(entry.name))
    return ended


def _end(descriptor: int) -> bool:
    if descriptor <= 2 or not os.get_inheritable(descriptor):
        return False
    if not os.readlink(_DESCRIPTORS / str(descriptor)).startswith("socket:"):
        return False
    # A copy: closing it leaves the owner's descriptor as it is.
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        over_network = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
        if not over_network or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        connection.shutdown(socket.SHUT_RDWR)
    return True
