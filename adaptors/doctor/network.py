"""Addresses, ports, keys and file descriptors of the control channel and of the rendezvous."""

from __future__ import annotations

import errno
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from mindio_tft_patch.adaptors.doctor.command import TTPRUN, Launch
from mindio_tft_patch.adaptors.doctor.findings import Finding, error, ok, warning
from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError
from mindio_tft_patch.protocol import address as addresses
from mindio_tft_patch.protocol import wire

AREA = "network"
FREE, TAKEN, ELSEWHERE, REFUSED = "free", "taken", "not an address of this machine", "not allowed"


class Network(Protocol):
    """What the checks ask of this machine."""

    def resolve(self, host: str) -> list[str]:
        """Numeric addresses of a name; empty when it does not resolve."""
        ...

    def port(self, address: str, port: int) -> str:
        """FREE, TAKEN, ELSEWHERE or REFUSED."""
        ...


class ThisMachine:
    """The network of this machine."""

    def resolve(self, host: str) -> list[str]:
        """Ask the resolver."""
        try:
            return addresses.resolve(host, 0)
        except ControlError:
            return []

    def port(self, address: str, port: int) -> str:
        """Bind it and let it go."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # As the servers do: a connection of an earlier job that is still closing does not matter.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, port))
                probe.listen(1)
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                return TAKEN
            return REFUSED if problem.errno in (errno.EACCES, errno.EPERM) else ELSEWHERE
        return FREE


@dataclass(frozen=True)
class Situation:
    """What the network checks look at."""

    config: Config
    launch: Launch
    launcher: str
    address_given: bool  # one of TTP_ADDR, CONTROLLER_ADDR, PROCESSOR_ADDR is set

    @property
    def controller(self) -> tuple[str, str]:
        """Address that the controller binds, and the variable that says so."""
        if self.launcher == TTPRUN and self.launch.nodes > 1 and not self.address_given:
            return self.launch.master_address, "--master-addr (or --rdzv-endpoint)"
        return self.config.controller_bind, "TTP_ADDR (or CONTROLLER_ADDR)"


def judge(situation: Situation, network: Network) -> Iterator[Finding]:
    """Addresses and ports, of the controller if the job is protected, and of the rendezvous."""
    launch, config = situation.launch, situation.config
    if config.high_availability:
        yield from _judge_controller(situation, network)
        yield from _judge_keys(situation, network)
    if launch.nodes > 1:
        yield from _judge_address(launch.master_address, "--master-addr (or --rdzv-endpoint)", launch, network)
    if launch.static and launch.node_rank == 0:
        yield from _judge_port(
            launch.master_address,
            launch.master_port,
            network,
            who="rendezvous",
            variable="--master-port",
            address_variable="--master-addr",
        )
        if config.high_availability and launch.master_port == config.port:
            yield error(
                AREA,
                f"Controller and rendezvous are both to use port {config.port}.",
                "Change TTP_PORT or --master-port.",
            )


def _judge_controller(situation: Situation, network: Network) -> Iterator[Finding]:
    launch, config = situation.launch, situation.config
    address, variable = situation.controller
    if launch.nodes > 1 and situation.launcher != TTPRUN and not situation.address_given:
        yield error(
            AREA,
            f"The controller would listen on {config.controller_bind}, where other nodes cannot reach it.",
            "Set TTP_ADDR to the address of node 0 on all nodes, or start with ttprun, which knows it.",
        )
        return
    yield from _judge_address(address, variable, launch, network)
    if config.controller_address != config.controller_bind and not network.resolve(config.controller_address):
        yield error(
            AREA, f"The name {config.controller_address!r} does not resolve here.", "Change PROCESSOR_ADDR or TTP_ADDR."
        )
    if launch.node_rank == 0:
        yield from _judge_port(
            address, config.port, network, who="controller", variable="TTP_PORT", address_variable=variable
        )


def _judge_address(address: str, variable: str, launch: Launch, network: Network) -> Iterator[Finding]:
    found = network.resolve(address)
    if not found:
        yield error(AREA, f"The name {address!r} does not resolve here.", f"Change {variable}.")
        return
    loopback = all(addresses.is_loopback(one) for one in found)
    if loopback and launch.nodes > 1:
        why = f"{address} is {', '.join(found)} on this machine" if address not in found else f"{address} is loopback"
        hosts = " (often a line for the host's own name in /etc/hosts)" if "127.0.1.1" in found else ""
        yield error(
            AREA,
            f"{why}{hosts}, so that the other nodes cannot reach it.",
            f"Set {variable} to an address of a network interface of node 0.",
        )
    elif "127.0.1.1" in found:
        yield warning(
            AREA,
            f"{address} resolves to 127.0.1.1 on this machine (a line in /etc/hosts): good for one node only.",
            f"Set {variable} to a numeric address before you use more nodes.",
        )


def _judge_port(
    address: str, port: int, network: Network, *, who: str, variable: str, address_variable: str
) -> Iterator[Finding]:
    for numeric in network.resolve(address):
        state = network.port(numeric, port)
        if state == FREE:
            yield ok(AREA, f"Port {port} on {numeric} is free for the {who}.")
        elif state == TAKEN:
            yield error(
                AREA,
                f"Port {port} on {numeric}, which the {who} needs, is in use (perhaps by another job on this host).",
                f"Set {variable} to a free port, the same on all nodes.",
            )
        elif state == REFUSED:
            yield error(AREA, f"Port {port} on {numeric} may not be used.", f"Set {variable} to a port above 1023.")
        else:
            yield warning(
                AREA,
                f"{numeric} is not an address of this machine, so the port of the {who} was not tried.",
                f"Run the doctor on node 0; if this is node 0, change {address_variable}.",
            )


def _judge_keys(situation: Situation, network: Network) -> Iterator[Finding]:
    config = situation.config
    if config.encrypted:
        if wire.curve_available():
            yield ok(AREA, "The control channel is encrypted (CURVE); its keys travel through the job's own store.")
        else:
            yield error(
                AREA,
                "The installed libzmq cannot encrypt (no CURVE).",
                "Install pyzmq from PyPI, or set TTP_TLS=0 on a trusted network.",
            )
        return
    address, _ = situation.controller
    if not all(addresses.is_loopback(one) for one in network.resolve(address)):
        yield warning(
            AREA,
            f"TTP_TLS=0: the control channel on {address} port {config.port} is open to anybody who can reach it.",
            "Remove TTP_TLS=0 unless the network is trusted.",
        )


def judge_descriptors(world_size: int, nodes: int) -> Iterator[Finding]:
    """The open-file limit of the process that runs the controller; the doctor's own limit stands for it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    shortage = wire.descriptor_shortage(world_size)
    if shortage is None:
        yield ok("descriptors", f"The open-file limit ({limit}) is enough for a controller of {world_size} ranks.")
        return
    message, _, change = shortage.partition("Raise it")
    if limit < world_size + nodes:
        yield error("descriptors", message.strip(), f"Raise it{change}")
    else:
        yield warning("descriptors", message.strip(), f"Raise it{change}")
