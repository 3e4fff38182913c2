"""Host names and addresses, IPv4 and IPv6."""

from __future__ import annotations

import contextlib
import ipaddress
import socket

from mindio_tft_patch.errors import ControlError


def resolve(host: str, port: int) -> list[str]:
    """Numeric addresses of a host name or address, each once.

    Raises:
        ControlError: the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ControlError(
            f"The name {host!r} cannot be resolved ({error}). Set CONTROLLER_ADDR or TTP_ADDR to an address or to a "
            "name that resolves on every node."
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def reachable(host: str, port: int) -> str:
    """The first address of a name that accepts a connection now; else the first one.

    A name may stand for an IPv4 and an IPv6 address of which the controller has bound one only, and ZeroMQ does not
    try the second.

    Raises:
        ControlError: the name does not resolve.
    """
    addresses = resolve(host, port)
    if len(addresses) > 1:
        for address in addresses:
            with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0):
                return address
    return addresses[0]


def url(address: str, port: int) -> str:
    """The ZeroMQ name of a numeric address."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
