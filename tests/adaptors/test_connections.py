"""Connections to other ranks are ended for good, whoever else holds their descriptors; no others are."""

from __future__ import annotations

import os
import socket

import pytest

from mindio_tft_patch.adaptors.device.connections import hang_up

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def listener() -> socket.socket:
    """Accepts connections of this process."""
    return socket.create_server(("127.0.0.1", 0))


def connect(listener: socket.socket) -> Pair:
    """Both ends of a new connection."""
    end = socket.create_connection(listener.getsockname())
    other = listener.accept()[0]
    other.settimeout(5.0)
    return end, other


def test_a_connection_that_started_programs_would_inherit_is_ended_though_a_copy_is_held(
    listener: socket.socket,
) -> None:
    end, other = connect(listener)
    copy = os.dup(end.fileno())
    end.set_inheritable(True)
    assert hang_up() == 1
    end.close()
    assert other.recv(1) == b""
    os.close(copy)


def test_a_listener_and_connections_of_python_are_left_alone(listener: socket.socket) -> None:
    end, other = connect(listener)
    listener.set_inheritable(True)
    assert hang_up() == 0
    end.sendall(b"x")
    assert other.recv(1) == b"x"
    connect(listener)


def test_pipes_files_and_local_sockets_are_left_alone() -> None:
    reading, writing = os.pipe()
    one, other = socket.socketpair()
    for descriptor in (reading, writing, one.fileno(), other.fileno()):
        os.set_inheritable(descriptor, True)
    assert hang_up() == 0
    one.sendall(b"x")
    assert other.recv(1) == b"x"
