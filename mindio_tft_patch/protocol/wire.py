"""Messages over ZeroMQ: the only file that opens sockets of it.

The controller holds a ROUTER, every processor and agent a DEALER. Each socket has a context of its own, because the
authentication hook of ZeroMQ (ZAP) belongs to a context, and because a context can then be closed without asking what
else lives in the process.

A socket belongs to one thread; only `wake` may be called from others. Nothing that arrives from the network can raise
out of `receive`: what cannot be understood is dropped and logged, a few lines a minute at most.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from mindio_tft_patch.config import Config
from mindio_tft_patch.errors import ControlError
from mindio_tft_patch.protocol.address import is_loopback, reachable, resolve, url
from mindio_tft_patch.protocol.endpoint import Endpoint
from mindio_tft_patch.protocol.keys import Keys, new_keys
from mindio_tft_patch.protocol.messages import DownMessage, UpMessage

logger = logging.getLogger("mindio_tft_patch.wire")

UP_BYTES_MAX = 4 << 20  # the largest message of a rank is Ready: its own replica sets
DOWN_BYTES_MAX = 64 << 20  # a plan names a source for every replica set of the job
DESCRIPTORS_SPARE = 128  # what the process itself has open: logs, checkpoints, data files, sockets of torch

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def encode(encoder: msgspec.msgpack.Encoder, message: UpMessage | DownMessage) -> bytes:
    """A message as bytes. Texts of others (of exceptions, of file names) may hold what UTF-8 has no bytes for."""
    try:
        return encoder.encode(message)
    except UnicodeEncodeError:
        return encoder.encode(_encodable(msgspec.to_builtins(message)))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return [_encodable(one) for one in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Incoming:
    """A message and the routing id of the connection that it came on."""

    identity: bytes
    message: UpMessage


class Complaints:
    """Logs warnings of one kind at most once an interval, with the number of those left out.

    Args:
        interval_seconds: least time between two lines of the same kind.
    """

    def __init__(self, interval_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval_seconds
        self._clock = clock
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log `message`, unless one of this kind was logged lately."""
        now = self._clock()
        last = self._last.get(kind)
        if last is not None and now - last < self._interval:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._last[kind] = now
        more = self._left_out.pop(kind, 0)
        logger.warning("%s%s", message, f" ({more} more like this were not logged)" if more else "")


class _Waker:
    """Lets another thread end a poll; a socket pair, since ZeroMQ sockets belong to one thread."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: a wake-up is pending already; closed: nobody is left to wake
            self._writer.send(b"!")

    def drain(self) -> None:
        with contextlib.suppress(OSError):
            while self.reader.recv(4096):
                pass

    def close(self) -> None:
        self.reader.close()
        self._writer.close()


class _Context(zmq.Context):  # type: ignore[type-arg]
    """A context that is ended by `close` only.

    Ending one waits for its sockets; done by the garbage collector, in whatever thread that happens to run, it would
    stop that thread for ever when a socket was left open.
    """

    def __del__(self) -> None:
        return


class _Socket:
    """What both ends have in common: context, wake-up, monitor, closing."""

    def __init__(self, kind: int, maximum_bytes: int) -> None:
        self._context = _Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._inner: list[zmq.Socket[bytes]] = []
        self._pid = os.getpid()
        self._waker = _Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.reader, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self.complaints = Complaints()
        # The default lingers for ever: a process could not end while its peer is unreachable.
        self._socket.setsockopt(zmq.LINGER, 1000)
        # The default of 1,000 is per peer; without a bound of our own a stuck peer costs memory without limit.
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        # The default takes frames of any size: one peer could make the process run out of memory.
        self._socket.setsockopt(zmq.MAXMSGSIZE, maximum_bytes)
        # Off by default; on, IPv4 addresses still work.
        self._socket.setsockopt(zmq.IPV6, 1)
        # The default of 30 s lets silent connections hold a file descriptor each for that long.
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
        # Without it a peer whose machine lost power is noticed by TCP after hours.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)

    def _watch(self, events: int) -> zmq.Socket[bytes]:
        monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(events)
        monitor.setsockopt(zmq.LINGER, 0)
        self._poller.register(monitor, zmq.POLLIN)
        self._inner.append(monitor)
        return monitor

    def wake(self) -> None:
        """End a `receive` that waits in another thread."""
        self._waker.wake()

    def _poll(self, timeout_seconds: float) -> dict[Any, int]:
        ready = dict(self._poller.poll(int(max(0.0, timeout_seconds) * 1000)))
        if self._waker.reader.fileno() in ready or self._waker.reader in ready:
            self._waker.drain()
        return ready

    def close(self) -> None:
        """Close; what was sent is still delivered within a second. Does nothing in a forked child."""
        if os.getpid() != self._pid or self._socket.closed:
            return
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disable_monitor()
        self._socket.close()
        for inner in self._inner:  # one that stays open would make the context wait for ever
            inner.close()
        self._waker.close()
        self._context.term()  # waits for at most LINGER


class ServerSocket(_Socket):
    """The controller's end.

    Args:
        keys: of the channel; None: made anew when it is encrypted.

    Raises:
        ControlError: the port is taken, or the address cannot be bound.
        ConfigError: the keys are those of a rank.
    """

    def __init__(self, config: Config, keys: Keys | None = None) -> None:
        super().__init__(zmq.ROUTER, UP_BYTES_MAX)
        self._decoder = msgspec.msgpack.Decoder(UpMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._zap: zmq.Socket[bytes] | None = None
        # Off by default: messages to a peer that is gone would vanish without a word.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Off by default: a peer that reconnects would be refused until TCP notices that its old connection is dead.
        # Routing ids are random, so that nobody can take over a connection by claiming a rank.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # The default of 100 is too few when all ranks of a large job connect in the same second.
        self._socket.setsockopt(zmq.BACKLOG, 4096)
        self._monitor = self._watch(zmq.EVENT_ACCEPT_FAILED | _FAILED_HANDSHAKES)
        try:
            self.endpoint = self._authenticate(config, keys or new_keys()) if config.encrypted else _plain(config)
            _bind(self._socket, config)
        except BaseException:
            self.close()
            raise

    def _authenticate(self, config: Config, keys: Keys) -> Endpoint:
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind("inproc://zeromq.zap.01")
        self._inner.append(self._zap)
        self._poller.register(self._zap, zmq.POLLIN)
        self._allowed = z85.decode(keys.client_public)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.controller_secret)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, b"mindio_tft_patch")
        return keys.endpoint(config.controller_address, config.port)

    def receive(self, timeout_seconds: float) -> list[Incoming]:
        """Messages that have arrived, waiting at most `timeout_seconds` for the first."""
        ready = self._poll(timeout_seconds)
        if self._zap is not None and self._zap in ready:
            self._answer_authentication(self._zap)
        if self._monitor in ready:
            self._read_monitor()
        messages: list[Incoming] = []
        # Bounded, so that a flood from one peer cannot keep the controller from its clock.
        for _ in range(1000 if self._socket in ready else 0):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            incoming = self._decode(frames)
            if incoming is not None:
                messages.append(incoming)
        return messages

    def _decode(self, frames: list[bytes]) -> Incoming | None:
        if len(frames) != 2:
            self.complaints.warn("frames", f"Dropped a message of {len(frames)} frames; a peer sends exactly one.")
            return None
        try:
            return Incoming(frames[0], self._decoder.decode(frames[1]))
        except (msgspec.DecodeError, RecursionError) as error:
            self.complaints.warn("decode", f"Dropped a message of {len(frames[1])} bytes that is no message: {error}")
            return None

    def _answer_authentication(self, zap: zmq.Socket[bytes]) -> None:
        """One request of ZeroMQ's authentication protocol (RFC 27): is this public key allowed in?"""
        frames = zap.recv_multipart()
        version, request = frames[0], frames[1]
        known = len(frames) > 6 and frames[5] == b"CURVE" and frames[6] == self._allowed
        if not known:
            peer = frames[3].decode(errors="replace") if len(frames) > 3 else "?"
            self.complaints.warn("key", f"Refused a connection from {peer}: its key is not one of this job.")
        code, text = (b"200", b"OK") if known else (b"400", b"key is not of this job")
        zap.send_multipart([version, request, code, text, b"", b""])

    def _read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
                if event["event"] == zmq.EVENT_ACCEPT_FAILED:
                    reason = os.strerror(event["value"])
                    self.complaints.warn("accept", f"A connection could not be accepted: {reason}. Raise `ulimit -n`.")
                else:
                    self.complaints.warn(
                        "handshake",
                        "Dropped a connection that did not complete the handshake: a port scan, a foreign program, "
                        "or a rank with another TTP_TLS setting.",
                    )

    def send(self, identity: bytes, message: DownMessage) -> bool:
        """Send to one connection; False when there is none of this id any more, or its queue is full."""
        try:
            self._socket.send_multipart([identity, encode(self._encoder, message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True


class PeerSocket(_Socket):
    """A processor's or an agent's end; connects, and reconnects, in the background."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(zmq.DEALER, DOWN_BYTES_MAX)
        self._decoder = msgspec.msgpack.Decoder(DownMessage)
        self._encoder = msgspec.msgpack.Encoder()
        self._trouble = "no connection was accepted there"
        # Random: see ROUTER_HANDOVER above. ZeroMQ reserves ids that begin with a zero byte.
        self._socket.setsockopt(zmq.ROUTING_ID, b"p" + uuid4().bytes)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        # The default never backs off: thousands of ranks would knock ten times a second at a dead controller.
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if endpoint.encrypted:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, endpoint.server_public or b"")
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, endpoint.client_public or b"")
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, endpoint.client_secret or b"")
        self._monitor = self._watch(zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED_HANDSHAKES)
        try:
            self._socket.connect(url(reachable(endpoint.address, endpoint.port), endpoint.port))
        except zmq.ZMQError as error:
            self._trouble = str(error)
        except BaseException:
            self.close()
            raise

    @property
    def trouble(self) -> str:
        """What stands between this peer and the controller, as far as it can be seen; for error messages."""
        return self._trouble

    def send(self, message: UpMessage) -> bool:
        """Queue a message; False when the queue is full, which means that the controller has been gone for long."""
        try:
            self._socket.send(encode(self._encoder, message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
            # Trying again would not help: without it, those that come after it are still sent.
            self.complaints.warn("encode", f"Left out a {type(message).__name__} that cannot be sent: {error}")
        return True

    def receive(self, timeout_seconds: float) -> list[DownMessage]:
        """Messages that have arrived, waiting at most `timeout_seconds` for the first."""
        ready = self._poll(timeout_seconds)
        if self._monitor in ready:
            self._read_monitor()
        messages: list[DownMessage] = []
        for _ in range(1000 if self._socket in ready else 0):
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
            except (msgspec.DecodeError, RecursionError) as error:
                self.complaints.warn("decode", f"Dropped something from the controller that is no message: {error}")
        return messages

    def _read_monitor(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_CONNECTED:
                    self._trouble = "something accepts connections there but did not complete the handshake"
                elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._trouble = "the connection stands but the controller does not answer"
                else:
                    self._trouble = "the handshake failed: other keys, another TTP_TLS setting, or a foreign program"


def _plain(config: Config) -> Endpoint:
    if not all(is_loopback(address) for address in resolve(config.controller_bind, config.port)):
        logger.warning(
            "TTP_TLS=0: the control channel at %s port %d is open to anybody who can reach it, and is readable on the "
            "network. Remove TTP_TLS=0 unless the network is trusted.",
            config.controller_bind,
            config.port,
        )
    return Endpoint(config.controller_address, config.port)


def _bind(router: zmq.Socket[bytes], config: Config) -> None:
    addresses = resolve(config.controller_bind, config.port)
    for address in addresses:
        try:
            router.bind(url(address, config.port))
        except zmq.ZMQError as error:
            raise ControlError(_bind_trouble(config, address, error)) from None
    named = config.controller_bind not in addresses and config.controller_bind != "localhost"
    if named and all(is_loopback(address) for address in addresses):
        logger.warning(
            "%s resolves to %s on this machine: other nodes cannot reach the controller there. With several nodes set "
            "CONTROLLER_ADDR (or TTP_ADDR) to an address of a network interface.",
            config.controller_bind,
            ", ".join(addresses),
        )


def _bind_trouble(config: Config, address: str, error: zmq.ZMQError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"The controller cannot use port {config.port} on {address}: another program (perhaps another job on this "
            "host) uses it. Set TTP_PORT to a free port, the same on all nodes."
        )
    return (
        f"The controller cannot bind {address} port {config.port}: {error.strerror}. Set CONTROLLER_ADDR (or TTP_ADDR) "
        "to an address of this machine and TTP_PORT to a port that may be used."
    )


def descriptor_shortage(world_size: int) -> str | None:
    """Why the open-file limit of this process is too low for a controller of `world_size` ranks; None when it is not.

    Each rank and each agent holds one connection; we count one agent per rank, the worst case.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = 2 * world_size + DESCRIPTORS_SPARE
    if limit == resource.RLIM_INFINITY or needed <= limit:
        return None
    return (
        f"The controller may need {needed} open files for {world_size} ranks, but the limit is {limit}. "
        f"Raise it with `ulimit -n {needed}` before the start."
    )


def curve_available() -> bool:
    """Whether the installed libzmq can encrypt."""
    return bool(zmq.has("curve"))
